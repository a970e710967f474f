"""A cluster of one's own: `twinpool serve` as a child process, for as long as a command or a bench needs it."""

from __future__ import annotations

import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from twinpool.cluster.processes.process_ids import TIED
from twinpool.contracts.errors import TwinpoolError
from twinpool.contracts.python_command import module_command

START_S = 300.0
STOP_S = 40.0
"""Longer than `serve` takes to end, answers that run included."""
LOOK_S = 0.2
_READY = re.compile(r"^Twinpool is ready: (\S+)", re.MULTILINE)
_SHOWN = 400


class ClusterFailed(TwinpoolError):
    """Raised when the cluster doesn't become ready; the text is the end of what it said."""


@contextmanager
def own_cluster(flags: Sequence[str]) -> Iterator[str]:
    """Run `twinpool serve` with `flags`, on a free port unless they name one, until the block ends; yields its URL.

    It dies with this process, and a Ctrl-C is this process's alone. Raises `ClusterFailed`.
    """
    command = [*TIED, *module_command("twinpool.cli.commands", "serve", "--port", "0", *flags)]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield _url(process, said)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _url(process: subprocess.Popen[bytes], said: IO[bytes]) -> str:
    """Wait for the line that says where it serves."""
    deadline = time.monotonic() + START_S
    while True:
        said.seek(0)
        text = said.read().decode(errors="replace")
        if ready := _READY.search(text):
            return ready[1]
        if process.poll() is not None or time.monotonic() > deadline:
            raise ClusterFailed(f"the cluster did not become ready: {' '.join(text.split())[-_SHOWN:]}")
        time.sleep(LOOK_S)
