"""A cluster of one's own for the time of a bench."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_READY = re.compile(r"^Twinpool is ready: (\S+)", re.MULTILINE)
_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 20.0


@contextmanager
def serving(model: str, settings: Sequence[str] = (), flags: Sequence[str] = ()) -> Iterator[str]:
    """`twinpool serve` on a free port, one worker of each role unless `flags` say more; yields its URL, and ends it.

    `settings` are ``section.key=value``. Raises `RuntimeError` with what it said when it doesn't become ready.
    """
    command = [sys.executable, "-m", "cli.commands", "serve", "--model", model, "--port", "0", *flags]
    for setting in settings:
        command += ["--set", setting]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, cwd=Path(__file__).parents[2], start_new_session=True
        )
        try:
            deadline = time.monotonic() + _START_TIMEOUT_S
            while True:
                said.seek(0)
                text = said.read().decode(errors="replace")
                if ready := _READY.search(text):
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the cluster did not become ready; it said:\n{text}")
                time.sleep(0.2)
            yield ready[1]
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
