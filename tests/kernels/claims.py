"""Claims that need a process of their own: Triton's interpreter is chosen, for the whole process, at its import."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from tests.kernels.ordered_dot import use_ordered_dot


def names(script: str) -> list[str]:
    """The claims of a script of this folder."""
    return re.findall(r"^def (claim_\w+)", Path(__file__).with_name(script).read_text(), re.MULTILINE)


def quicken_interpreter() -> None:
    """Take out of Triton's interpreter what costs most of such a script's time and changes nothing that it computes.

    Operations are put into `triton.language` once in this process, and stay there: as it is, the interpreter looks
    through all of that package at each call of a function within a kernel. (It takes away what it put there after a
    launch, but not what it put there for such a call.) Sums of integers are not computed again in 64 bits: unless it is
    debugging, the interpreter throws the comparison away. What follows from a type is computed once.
    """
    from triton import language
    from triton.runtime import interpreter

    class Sees:
        """A function as far as the interpreter looks: what it patches is what can be seen from there."""

        __globals__: ClassVar = {"tl": language, "core": language.core}

    interpreter._patch_lang(Sees)
    kept = interpreter._LangPatchScope()
    interpreter._patch_lang = lambda function: kept
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    _remember_types(language.core, interpreter)


def _remember_types(core: Any, interpreter: Any) -> None:
    """Have equal types of blocks share what they are made of, and tensors of a type what follows from it."""
    number_type, begin_block, begin_tensor = interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__
    numbers, blocks = dict[str, Any](), dict[Any, dict[str, Any]]()

    def known_number_type(tt_dtype: Any) -> Any:
        name = tt_dtype.name
        if (found := numbers.get(name)) is None:
            found = numbers[name] = number_type(tt_dtype)
        return found

    def begin_known_block(self: Any, element_ty: Any, shape: Any) -> None:
        if type(element_ty) is not core.dtype:  # A pointer's name doesn't have all that it is.
            begin_block(self, element_ty, shape)
            return
        key = (element_ty.name, *[size.value if isinstance(size, core.constexpr) else size for size in shape])
        if (found := blocks.get(key)) is None:
            begin_block(self, element_ty, shape)
            blocks[key] = self.__dict__
        else:
            self.__dict__ = found

    def begin_tensor_of_known_type(self: Any, handle: Any, type: Any) -> None:
        if (follows := type.__dict__.get("follows")) is None:
            begin_tensor(self, handle, type)
            type.follows = self.shape, self.numel, self.dtype
        else:
            self.handle, self.type = handle, type
            self.shape, self.numel, self.dtype = follows

    interpreter._get_np_dtype = known_number_type
    core.block_type.__init__, core.tensor.__init__ = begin_known_block, begin_tensor_of_known_type


def answer(namespace: Mapping[str, Any]) -> None:
    """What such a script does in the end: try each claim, or those that its arguments name, print the verdicts as
    JSON."""
    torch.set_num_threads(1)
    use_ordered_dot()
    quicken_interpreter()
    verdicts = dict[str, str | None]()
    for name, claim in list(namespace.items()):
        if name.startswith("claim_") and (name in sys.argv or len(sys.argv) == 1):
            try:
                claim()
                verdicts[name] = None
            except Exception:
                verdicts[name] = traceback.format_exc()
    sys.stdout.write(json.dumps(verdicts))
