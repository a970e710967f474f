"""An OpenTelemetry collector that a wheel of PyPI carries, fetched and unpacked into build/rotel: Rotel (Apache-2.0).

It is started as docs/explain.md has it, on free ports, and passes on what it takes to a server of the test's.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from tests.support.free_ports import free_port
from tests.support.served_cluster import ROOT, until

FOLDER = ROOT / "build" / "rotel"
PACKAGE = "rotel==0.0.1a15"
FETCH_S = 300
START_S = 30


class OutOfReach(Exception):
    """Raised when the collector can't be had, or doesn't run, on this machine."""


def collector_binary() -> Path:
    """The collector's binary. Raises `OutOfReach`."""
    binary = FOLDER / "rotel" / "rotel-agent"
    if not binary.is_file():
        fresh = FOLDER.with_name(f"rotel.{os.getpid()}")
        fetch = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(fresh), PACKAGE]
        try:
            fetched = subprocess.run(fetch, capture_output=True, text=True, timeout=FETCH_S, check=False)
            if fetched.returncode:
                raise OutOfReach(f"pip can't fetch {PACKAGE}: {fetched.stderr.strip().splitlines()[-1]}")
            if not FOLDER.exists():
                fresh.rename(FOLDER)
        except subprocess.TimeoutExpired:
            raise OutOfReach(f"{PACKAGE} didn't come within {FETCH_S} s") from None
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        binary.chmod(0o755)
    ran = subprocess.run([binary, "version"], capture_output=True, text=True, timeout=START_S, check=False)
    if ran.returncode:
        raise OutOfReach(f"it doesn't run here: {ran.stderr.strip()}")
    return binary


def shown_options() -> list[str]:
    """The words with which docs/explain.md starts it, the binary left out."""
    lines = (ROOT / "docs" / "explain.md").read_text().splitlines()
    (shown,) = [line for line in lines if line.startswith("collector/rotel/rotel-agent ")]
    assert f"pip install --target collector {PACKAGE}" in lines
    return shown.split()[1:]


class Rotel:
    """A collector that can be killed and started again on the same ports."""

    def __init__(self, binary: Path, folder: Path, sink: str) -> None:
        """`sink`: the base URL of the OTLP server to which it passes traces on."""
        self._binary, self._folder, self._sink = binary, folder, sink
        self._http, self._grpc = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self._http}/v1/traces"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        places = {"127.0.0.1:4318": f"127.0.0.1:{self._http}", "127.0.0.1:4317": f"127.0.0.1:{self._grpc}"}
        words = [places.get(word, word) for word in shown_options()]
        words[words.index("--otlp-exporter-endpoint") + 1] = self._sink
        words += ["--pid-file", str(self._folder / "rotel.pid"), "--log-file", str(self._folder / "rotel.log")]
        with (self._folder / "rotel.out").open("ab") as out:
            self._process = subprocess.Popen([self._binary, *words], stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        until(self._listens, f"the collector to listen; {self._folder / 'rotel.out'} has its words", START_S)

    def kill(self) -> None:
        """End it as a crash does. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(START_S)
            self._process = None

    def _listens(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self._http)) == 0
