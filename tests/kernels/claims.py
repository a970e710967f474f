"""Claims that need a process of their own: Triton's interpreter is chosen, for the whole process, at its import."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]

Verdicts = dict[str, str | None]
"""Claim -> null, or the traceback of its failure."""


def names(script: Path) -> list[str]:
    return re.findall(r"^def (claim_\w+)", script.read_text(), re.MULTILINE)


def interpret(script: Path) -> Verdicts:
    """Run all claims of `script` in the interpreter; triton is part of the development set-up."""
    assert importlib.util.find_spec("triton"), "triton is missing: install the development requirements"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    out: Verdicts = json.loads(done.stdout)
    return out


def answer(namespace: Mapping[str, Any]) -> None:
    """What such a script does in the end: try each claim, print the verdicts as JSON."""
    torch.set_num_threads(1)
    verdicts: Verdicts = {}
    for name, claim in list(namespace.items()):
        if name.startswith("claim_"):
            try:
                claim()
                verdicts[name] = None
            except Exception:
                verdicts[name] = traceback.format_exc()
    sys.stdout.write(json.dumps(verdicts))
