"""The units: systemd takes them, `twinpool` takes their commands, and they are told what they wait for."""

from __future__ import annotations

import configparser
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.free_ports import free_port
from tests.support.prometheus_server import DEPLOY
from tests.support.served_cluster import ROOT, environment
from twinpool.cli.command_line import parser
from twinpool.cluster.serve.shutdown_signal import ASKED, END_S
from twinpool.contracts.config import ClusterConfig
from twinpool.contracts.signal_listener import SOCKET_VARIABLE, ServiceManager

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
EXPOSURE = 4.0
"""Of systemd's own measure, 0 to 10, the most that a unit may have; one without any hardening has 9.2."""


class Unit(configparser.RawConfigParser):
    def __init__(self, path: Path) -> None:
        super().__init__(strict=False, interpolation=None)
        self.optionxform = str  # type: ignore[assignment, method-assign]
        self.read(path)

    @property
    def command(self) -> list[str]:
        return shlex.split(self["Service"]["ExecStart"])


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_takes_the_unit_and_finds_it_hardened(path: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    copied = tmp_path / path.name  # the program isn't where it will be
    copied.write_text(path.read_text().replace("/opt/twinpool/bin/twinpool", "/bin/true"))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(copied)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (checked.returncode, checked.stderr.strip()) == (0, "")
    security = ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE * 10:g}", "--no-pager"]
    done = subprocess.run([*security, str(copied)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_its_command_is_one_that_twinpool_takes_and_waits_for_the_word(path: Path) -> None:
    unit = Unit(path)
    words = [word.replace("${ADDRESS}", "10.0.0.2").replace("${PORT}", "7400") for word in unit.command]
    assert words[0] == "/opt/twinpool/bin/twinpool"
    assert parser().parse_args(words[1:]).config == Path("/etc/twinpool/cluster.yaml")
    assert unit["Service"]["Type"] == "notify"


def test_a_stop_waits_for_the_drain_and_signals_the_main_process_alone() -> None:
    service = Unit(DEPLOY / "systemd" / "twinpool.service")["Service"]
    assert float(service["TimeoutStopSec"]) >= ClusterConfig().stop_timeout_s + END_S + 10
    assert (service["KillMode"], service["KillSignal"]) == ("mixed", "SIGTERM")
    assert "SuccessExitStatus" not in service, "an end that was asked for has exit code 0"
    assert ASKED == 0


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """The socket on which a service manager hears, and its address."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        address = str(tmp_path / "notify")
        heard.bind(address)
        heard.settimeout(60.0)
        yield address, heard


def test_a_process_takes_the_address_out_of_its_environment(
    manager: tuple[str, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, heard = manager
    monkeypatch.setenv(SOCKET_VARIABLE, address)
    adopted = ServiceManager.adopt()
    ServiceManager.adopt().ready("a child")  # has nothing to tell
    adopted.ready("serves")
    adopted.stopping()
    assert [heard.recv(4096) for _ in range(2)] == [b"READY=1\nSTATUS=serves", b"STOPPING=1"]


def test_an_abstract_address_is_reached_and_one_that_is_gone_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind("")  # a free abstract address
        heard.settimeout(10.0)
        name = "@" + heard.getsockname()[1:].decode()
        ServiceManager(name).ready("serves")
        assert heard.recv(4096).startswith(b"READY=1")
    ServiceManager(name).ready("serves")
    assert "can't be told" in caplog.text


@pytest.mark.slow
def test_a_controller_says_that_it_leads_and_that_it_ends(manager: tuple[str, socket.socket], tmp_path: Path) -> None:
    address, heard = manager
    port = free_port()
    file = tmp_path / "cluster.yaml"
    file.write_text(f"cluster: {{ledger: {tmp_path / 'table'}}}\n")
    command = Unit(DEPLOY / "systemd" / "twinpool-controller.service").command[1:-1]  # nobody has led: no --standby
    words = [word.replace("${ADDRESS}", "127.0.0.1").replace("${PORT}", str(port)) for word in command]
    words[words.index("--config") + 1] = str(file)
    with subprocess.Popen(
        [sys.executable, "-m", "twinpool.cli.commands", *words],
        env=environment(tmp_path) | {SOCKET_VARIABLE: address},
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            assert heard.recv(4096).decode() == f"READY=1\nSTATUS=leads at 127.0.0.1:{port}"
            process.terminate()
            assert heard.recv(4096) == b"STOPPING=1"
            assert process.wait(60) == 0
        finally:
            process.kill()
