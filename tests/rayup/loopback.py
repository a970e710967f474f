"""The cluster of deploy/ray/loopback.yaml: three Ray nodes of one machine, through ssh to itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.rayup import machine
from tests.rayup.machine import BIN, ROOT, daemon, operator, ray, reachable, say, ssh, stop, strangers, wait_for
from tests.support.served_cluster import READY

LAUNCH = ROOT / "deploy" / "ray" / "loopback.yaml"
HEAD = "127.0.0.1"
ADDRESSES = (HEAD, "127.0.0.2", "127.0.0.3")


@contextmanager
def sshd(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An sshd that listens on loopback."""
    work = home.parent
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", work / "host"], check=True)
    authorized = home / ".ssh" / "authorized_keys"
    authorized.write_text((home / ".ssh" / "id_ed25519.pub").read_text())
    separation = Path("/run/sshd")
    made = not separation.exists()
    separation.mkdir(mode=0o755, exist_ok=True)
    there = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "RAY_TMPDIR")}
    (work / "sshd_config").write_text(machine.sshd_config(ADDRESSES, work / "host", authorized, there))
    log = (work / "sshd.log").open("wb")
    process = subprocess.Popen([str(daemon("sshd")), "-D", "-e", "-f", work / "sshd_config"], stdout=log, stderr=log)
    try:
        wait_for(lambda: process.poll() is not None or reachable(home, HEAD), 10, "sshd")
        if process.poll() is not None:
            stop(f"sshd did not start: {(work / 'sshd.log').read_text()[-400:]}")
        yield process
    finally:
        process.terminate()
        process.wait()
        log.close()
        if made:
            separation.rmdir()


def rehearse() -> None:
    """Launch it, use it, take it down, and find nothing left."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with operator() as home, sshd(home) as daemon_there:
        launch = home / "loopback.yaml"
        text = LAUNCH.read_text().replace("~/twinpool/.venv/bin", str(BIN)).replace("~/twinpool", str(ROOT))
        launch.write_text(text.replace("ssh_user: twinpool", "ssh_user: root"))
        ray("up", "-y", "--no-config-cache", str(launch), tries=3)
        serve = subprocess.Popen(
            [*ssh(home, HEAD), f"cd {ROOT} && RAY_AUTH_MODE=disabled exec twinpool serve --ray-address auto "
             "--prefill 1 --decode 2 --port 8000"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        _use(_ready(serve))
        mark = {"serve", "--ray-address"}
        (server,) = [p for p in psutil.process_iter() if mark <= set(p.cmdline()) and p.name() != "ssh"]
        server.send_signal(signal.SIGINT)
        if serve.wait(10) != 0:
            stop(f"twinpool serve ended with {serve.returncode}")
        say("serve has ended")
        ray("down", "-y", str(launch))
        own = {1, os.getpid(), daemon_there.pid}
        wait_for(lambda: not strangers(own), 40, lambda: f"the nodes to end: {strangers(own)}")
    say("nothing left running")


def _ready(serve: subprocess.Popen[str]) -> str:
    """The URL, once it is ready."""
    assert serve.stdout is not None
    for line in serve.stdout:
        say(line.rstrip())
        if line.startswith(READY):
            return line.removeprefix(READY).strip()
    for log in sorted((Path(os.environ["RAY_TMPDIR"])).glob("**/session_latest/logs/monitor.*")):
        say(f"--- {log.name}\n{log.read_text()[-6000:]}")
    stop("twinpool serve ended before it was ready")


def _use(url: str) -> None:
    body = json.dumps({"model": "demo", "prompt": "It was a fine morning, and", "max_tokens": 16}).encode()
    headers = {"Content-Type": "application/json", "X-Twinpool-Timeline": "1"}
    with urllib.request.urlopen(urllib.request.Request(url + "/v1/completions", body, headers), timeout=30) as response:
        answer = json.load(response)
    assert answer["usage"]["completion_tokens"] == 16, answer
    assert answer["twinpool"]["transfer_bytes"] > 0, answer
    say(f"a completion: {answer['choices'][0]['text']!r}")
    subprocess.run(["twinpool", "drain", "decode-1"], check=True)
    states = {w["name"]: w["state"] for w in json.loads(_output("twinpool", "status", "--json"))["workers"]}
    assert states == {"prefill-0": "ready", "decode-0": "ready", "decode-1": "left"}, states
    assert json.loads(_output("twinpool", "check", "--json"))["ok"]


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
