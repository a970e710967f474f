"""The command lines of this product's Python processes: none of them imports from the folder that it is started in.

``python -m NAME`` and ``python -c CODE`` put the working directory in front of all that can be imported: a user's
``router/`` or ``cache.py`` would be run in the place of ours. Every child gets ``-P`` (``sys.flags.safe_path``), and
finds our packages where this process has found them. Run as a script, this file is how modules of ours start.
"""

from __future__ import annotations

import gc
import runpy
import sys
from pathlib import Path

COLLECT_AFTER = (10_000, 50, 10)
"""Thresholds of the garbage collector (`gc.set_threshold`) in processes of ours. With Python's own, which are made for
small programs, a sixth of the time in which modules are imported is the collector's, that finds nothing in them."""


def module_command(module: str, *arguments: str, python: str = "") -> list[str]:
    """The command that runs `module` as ``__main__``.

    `python`: the interpreter, empty for this process's. Another one finds modules among its own packages alone: it may
    have another build of ours.
    """
    if python and python != sys.executable:
        return [python, "-P", "-m", module, *arguments]
    return [sys.executable, "-P", str(Path(__file__).absolute()), module, *arguments]


def script_command(*arguments: str) -> list[str]:
    """The command of a script that needs nothing but the standard library: ``script_command(FILE, …)``, or
    ``script_command("-c", CODE, …)``. It sees neither installed packages nor variables that are meant for Python."""
    return [sys.executable, "-S", "-P", "-E", *arguments]


def main() -> None:
    """``python_command.py MODULE ARGUMENTS...``: run the module in this process."""
    root = str(Path(__file__).absolute().parents[2])  # `build_id.import_root`, without importing anything first.
    if root not in sys.path:  # A source tree that isn't installed, which was found by the working directory.
        sys.path.insert(0, root)
    gc.set_threshold(*COLLECT_AFTER)
    module = sys.argv[1]
    del sys.argv[0]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
