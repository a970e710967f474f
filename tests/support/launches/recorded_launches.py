"""Launches of Triton kernels, written down rather than carried out: what the launchers would give a GPU.

The launchers run on tensors without contents (torch's device ``meta``), and what they hand to a kernel is kept: so
whoever compiles it afterwards compiles what production launches, whatever that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

_OPTIONS = ("num_warps", "num_stages")
_NAMES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv", torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip
_SCRATCH = {"m_ptr", "total_ptr", "acc_ptr", "m_out_ptr", "total_out_ptr", "acc_out_ptr", "scores_ptr"}
"""Names of arguments that are parts of results, or scores."""
_ALIGNED = 16
"""Bytes, or a divisor: Triton compiles pointers and integers that are multiples of it to wider accesses."""


@dataclass(frozen=True)
class RecordedLaunch:
    """One launch: a kernel, its grid, and its arguments as Triton specialises a compilation by them."""

    kernel: JITFunction[Any]
    grid: tuple[int, ...]
    signature: Mapping[str, str]
    """Triton's type of each argument, in order."""
    constants: Mapping[str, Any]
    """Arguments that are known when it is compiled; integers of 1 as well."""
    aligned: tuple[str, ...]
    """Pointers and integers that are multiples of 16."""
    options: Mapping[str, int]
    """Warps and stages, as far as the launcher says; the others are Triton's defaults."""
    scratch_bytes: int
    """What the launcher allocated for this launch besides results: the memory of arguments in `_SCRATCH`."""

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)


Run = Callable[..., Any]
"""`JITFunction.run`: a kernel, its arguments, and `grid` and `warmup` by name."""


@contextmanager
def intercepted(launch: Callable[[Run, JITFunction[Any], tuple[Any, ...], Any, dict[str, Any]], Any]) -> Iterator[None]:
    """Give the launches of this process to a function, with what would carry them out: the kernel, its arguments, its
    grid, and its arguments by name.

    Raises `RuntimeError` under Triton's interpreter, where kernels are functions that nothing compiles.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("kernels can't be compiled in Triton's interpreter; unset TRITON_INTERPRET")
    run = JITFunction.run

    def handed_over(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(run, self, args, grid, kwargs)

    JITFunction.run = handed_over
    try:
        yield
    finally:
        JITFunction.run = run


@contextmanager
def recording() -> Iterator[list[RecordedLaunch]]:
    """Keep the launches of this process in a list instead of carrying them out; no GPU is needed."""
    launches: list[RecordedLaunch] = []
    with intercepted(lambda run, kernel, args, grid, kwargs: launches.append(recorded(kernel, args, grid, kwargs))):
        yield launches


def recorded(
    kernel: JITFunction[Any], args: tuple[Any, ...], grid: tuple[int, ...], kwargs: dict[str, Any]
) -> RecordedLaunch:  # fmt: skip
    """A launch's value. Raises `TypeError` where arguments lack or are too many."""
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    if missing := set(kernel.arg_names) ^ set(given):
        raise TypeError(f"{kernel.fn.__name__}: arguments that lack or are too many: {', '.join(sorted(missing))}")
    signature, constants, aligned = dict[str, str](), dict[str, Any](), list[str]()
    for parameter in kernel.params:
        name, value = parameter.name, given[parameter.name]
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and specialised):
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = _kind(value)
        if not isinstance(value, float) and specialised and _multiple(value):
            aligned.append(name)
    held = [given[name].untyped_storage() for name in _SCRATCH & set(given)]
    memory = {storage._cdata: storage.nbytes() for storage in held}
    return RecordedLaunch(kernel, grid, signature, constants, tuple(aligned), options, sum(memory.values()))


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"*{_NAMES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _multiple(value: Any) -> bool:
    """Whether it is a multiple of 16; a tensor is where its storage, which is aligned, and its offset say."""
    at = value.storage_offset() * value.dtype.itemsize if isinstance(value, Tensor) else value
    return int(at) % _ALIGNED == 0
