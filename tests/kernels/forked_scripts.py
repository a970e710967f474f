"""Scripts of this folder, one after the other, by a process that has imported once what several of them import.

Each runs in a child that is forked before any thread has begun and any operation has run, so that it finds what a
process of its own would. Torch, Triton and transformers take seconds of a processor to be imported, a script's claims
often less.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
PATIENCE_S = 800
"""What a script may take, and the imports before the first of them."""
PRELOADED = ("torch", "triton", "tests.engine.harness", "tests.support.model_families")

Said = dict[str, Any]
"""One script's JSON: from a claim to null or the traceback of its failure, or from a kernel to what is in its code."""


class ScriptFailed(AssertionError):
    """Raised for a script that ended without its JSON; its text has what it wrote instead."""


def run_scripts(scripts: Mapping[str, Collection[str]], cache: Path, *, interpreted: bool) -> Iterator[tuple[str, Any]]:
    """The scripts' names as they end, each with its JSON or a `ScriptFailed`. `scripts`: file names of this folder, and
    the claims that are tried (none: all of them). `cache`: an empty folder for what is compiled. `interpreted`: in
    Triton's interpreter, which is chosen for a whole process."""
    assert importlib.util.find_spec("triton"), "triton is missing: install the development requirements"
    words = [f"{name}:{','.join(claims)}" for name, claims in scripts.items()]
    chosen = {"TRITON_INTERPRET": str(int(interpreted)), "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, __file__, *words], cwd=ROOT, env={**os.environ, **chosen}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                name, code, out, errors = json.loads(line)
                said = code == 0 and out.startswith("{")
                yield name, json.loads(out) if said else ScriptFailed(f"{name} ended with {code}: {errors or out}")
        finally:
            process.kill()


def _run(script: Path, claims: Collection[str]) -> tuple[int, str, str]:
    """Run one in a child of its own: its exit code (negative: a signal's number), its output and its errors."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if child == 0:
            signal.alarm(PATIENCE_S)
            os.dup2(out.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            sys.argv = [str(script), *claims]
            runpy.run_path(str(script), run_name="__main__")
            sys.exit()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        errors.seek(0)
        return code, out.read(), errors.read()


def main() -> None:
    """For each argument, ``SCRIPT:CLAIM,CLAIM``, print a line of JSON when it has ended."""
    asked = [
        (name, claims.split(",") if claims else []) for name, _, claims in (w.partition(":") for w in sys.argv[1:])
    ]
    texts = [(FOLDER / name).read_text() for name, _ in asked]
    signal.alarm(PATIENCE_S)
    for module in PRELOADED:
        if len([text for text in texts if module in text]) > 1:
            importlib.import_module(module)
    signal.alarm(0)
    for name, claims in asked:
        print(json.dumps([name, *_run(FOLDER / name, claims)]), flush=True)


if __name__ == "__main__":
    main()
