"""Claims that need a process of their own: Triton's interpreter is chosen, for the whole process, at its import."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from tests.kernels.ordered_dot import use_ordered_dot

ROOT = Path(__file__).resolve().parents[2]

Said = dict[str, Any]
"""One script's JSON: from a claim to null or the traceback of its failure, or from a kernel to what is in its code."""


def names(script: str) -> list[str]:
    """The claims of a script of this folder."""
    return re.findall(r"^def (claim_\w+)", Path(__file__).with_name(script).read_text(), re.MULTILINE)


def run_script(script: Path, cache: Path, claims: Collection[str] = ()) -> Said:
    """The JSON that a script of this folder prints: one that compiles for a GPU, by its name, or one for the
    interpreter. `cache`: an empty folder for what is compiled. `claims`: those that are tried; none: all of them."""
    assert importlib.util.find_spec("triton"), "triton is missing: install the development requirements"
    interpreted = "0" if script.name.startswith("compiled") else "1"
    environment = {**os.environ, "TRITON_INTERPRET": interpreted, "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, str(script), *claims], cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    out: Said = json.loads(done.stdout)
    return out


def patch_language_once() -> None:
    """Have the interpreter put its operations into `triton.language` once in this process, and leave them there.

    As it is, it looks through all of that package at each call of a function within a kernel: most of the time of such
    a script. It takes away what it put there after a launch, but not what it put there for such a call."""
    from triton import language
    from triton.runtime import interpreter

    class Sees:
        """A function as far as the interpreter looks: what it patches is what can be seen from there."""

        __globals__: ClassVar = {"tl": language, "core": language.core}

    interpreter._patch_lang(Sees)
    kept = interpreter._LangPatchScope()
    interpreter._patch_lang = lambda function: kept


def answer(namespace: Mapping[str, Any]) -> None:
    """What such a script does in the end: try each claim, or those that its arguments name, print the verdicts as
    JSON."""
    torch.set_num_threads(1)
    use_ordered_dot()
    patch_language_once()
    verdicts: Said = {}
    for name, claim in list(namespace.items()):
        if name.startswith("claim_") and (name in sys.argv or len(sys.argv) == 1):
            try:
                claim()
                verdicts[name] = None
            except Exception:
                verdicts[name] = traceback.format_exc()
    sys.stdout.write(json.dumps(verdicts))
