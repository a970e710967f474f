"""A rank as a process, told and heard line by line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Process:
    """A rank, and the lines to it and from it."""

    def __init__(self, script: Path, store: Path, rank: int, size: int) -> None:
        self.rank = rank
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(store), str(rank), str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"rank {self.rank} is gone"
        heard: dict[str, Any] = json.loads(line)
        return heard

    def end(self) -> None:
        self.process.kill()
        self.process.wait(60)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
