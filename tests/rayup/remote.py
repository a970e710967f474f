"""A detached cluster that runs on other hosts: its commands are given on the head, through ssh."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.rayup.hosts import Host
from tests.rayup.machine import BIN, ROOT, stop
from tests.support.served_cluster import READY, Access, Serving
from twinpool.cli.credential_commands import new_key

LAUNCH = ROOT / "deploy" / "ray" / "autoscaled.yaml"
CONFIG = ROOT / "configs" / "secure.yaml"
PORT, ADMIN_PORT = 8000, 8443
IDLE_MINUTES = 0.25
"""After so long a host without workers is given back; the file's five minutes would be waited for."""
SECRET_BYTES = 32


def write_launch(home: Path, model: Path) -> Path:
    """The file of `LAUNCH` as an operator changes it: the user, the paths, the checkpoint."""
    text = LAUNCH.read_text().replace("~/twinpool/.venv/bin", str(BIN)).replace("~/twinpool", str(ROOT))
    tree = yaml.safe_load(text)
    tree["auth"]["ssh_user"] = "root"
    tree["file_mounts"]["~/model"] = str(model)
    tree["idle_timeout_minutes"] = IDLE_MINUTES
    path = home / "autoscaled.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False, width=10_000))
    return path


def write_credentials(home: Path, address: str) -> Access:
    """The token, certificates and keys that the file's second step makes; returns who gets in by them."""
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(secrets.token_hex(32))
    (home / ".ray" / "auth_token").chmod(0o600)
    subprocess.run(["twinpool", "certs", "new", home / "certs", "--host", address], check=True, capture_output=True)
    client, operator = (new_key(home / name, "acme") for name in ("keys.json", "operators.json"))
    return Access(home / "certs" / "ca.pem", client, operator)


class Remote(Serving):
    """A cluster whose head is a host of the rehearsal."""

    def __init__(self, head: Host, home: Path, access: Access) -> None:
        self.head, self.access, self.runtime = head, access, home
        self.url, self.operators = f"https://{head.address}:{PORT}", f"https://{head.address}:{ADMIN_PORT}"
        self.model = httpx.get(f"{self.url}/v1/models", **access.web()).json()["data"][0]["id"]

    def twinpool(self, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        words = " ".join(shlex.quote(word) for word in arguments)
        return self.head.run(f"cd ~ && twinpool {words}", timeout, **self.access.operator)

    def status(self) -> dict[str, dict[str, Any]]:
        """Each worker's row, by name, from the operators' port: a command costs a second of a busy machine."""
        told = httpx.get(f"{self.operators}/cluster/status", timeout=20, **self.as_operator.web())
        assert told.status_code == 200, told.text
        return {row["name"]: row for row in told.json()["workers"]}

    @property
    def as_operator(self) -> Access:
        return Access(self.access.ca, self.access.admin_key)

    def metrics(self) -> dict[str, float]:
        found = {}
        for line in httpx.get(f"{self.operators}/metrics", **self.as_operator.web()).text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name] = float(value)
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Each worker's row, those that have left included."""
        return list(self.status().values())

    def on(self, node: str) -> list[str]:
        """Workers that are on a node, whatever they do there."""
        return sorted(
            row["name"] for row in self.rows() if row["node"] == node and row["state"] not in ("left", "dead")
        )


def serve(head: Host, secret: str, flags: list[str], sections: dict[str, dict[str, Any]], timeout_s: float) -> str:
    """`twinpool serve` on the head; returns what it has shown. Ends the rehearsal where it doesn't come to serve."""
    done = start(head, secret, flags, sections, timeout_s)
    if done.returncode != 0 or READY not in done.stdout:
        stop(f"twinpool serve: {done.returncode}\n{done.stdout}\n{done.stderr}\n{words_of(head)}")
    return done.stdout


def start(
    head: Host, secret: str, flags: list[str], sections: dict[str, dict[str, Any]], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Give the command of the file's fourth step, with more settings."""
    settings = [f"--set {s}.{key}={value}" for s, keys in sections.items() for key, value in keys.items()]
    words = ["twinpool serve --detach --model model --host 0.0.0.0 --ray-address auto", *flags, f"--port {PORT}"]
    words += [f"--config {CONFIG}", f"--set security.admin_host={head.address}", *settings]
    given = {"RAY_AUTH_MODE": "token", "TWINPOOL_CLUSTER_SECRET": secret}
    return head.run("cd ~ && " + " ".join(words), timeout_s, **given)


def words_of(head: Host) -> str:
    """The last words of the autoscaler of Ray, for whoever asks why nothing came."""
    found = head.run("tail -n 60 /tmp/ray/session_latest/logs/monitor.* 2>&1").stdout
    return f"--- Ray's autoscaler\n{found}"


def nodes_alive(head: Host) -> list[str]:
    """Host names of Ray's nodes that live, by what Ray says on the head."""
    told = head.run(
        "python -c 'import json, ray; ray.init(\"auto\", logging_level=40, log_to_driver=False); "
        'print(json.dumps([n["NodeManagerHostname"] for n in ray.nodes() if n["Alive"]]))\'',
        60, RAY_AUTH_MODE="token",
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    return sorted(json.loads(told.stdout.strip().splitlines()[-1]))


def environment_of_commands() -> None:
    """What the operator's own commands need here: Ray's token is asked for."""
    os.environ["RAY_AUTH_MODE"] = "token"
