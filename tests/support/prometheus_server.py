"""A real Prometheus for tests: its server, and promtool."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.cache.storage.rigs import die_with_parent
from tests.support.free_ports import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = ("twinpool-rules.yml", "twinpool-alerts.yml")
WAIT_S = 60.0


def binary(name: str) -> str:
    """Where `prometheus` or `promtool` is; skips the test where it isn't installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def quick_rules() -> dict[str, Any]:
    """The alerts, without the time for which each has to last."""
    rules: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus" / "twinpool-alerts.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule.pop("for", None)
    return rules


class PrometheusServer:
    """Prometheus in `folder`, which scrapes `targets` (``host:port``) each second; its alerts don't wait."""

    def __init__(self, folder: Path, targets: Sequence[str], **job: Any) -> None:
        """`job`: more of its scrape configuration."""
        given = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
        given["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        given["scrape_configs"][0] |= {"static_configs": [{"targets": list(targets)}], **job}
        folder.mkdir()
        (folder / "prometheus.yml").write_text(yaml.safe_dump(given))
        shutil.copy(DEPLOY / "prometheus" / RULES[0], folder)
        (folder / RULES[1]).write_text(yaml.safe_dump(quick_rules()))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [
                binary("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            cwd=folder,
            stdout=self._log,
            stderr=self._log,
            preexec_fn=die_with_parent,  # noqa: PLW1509
            env={"PATH": os.environ["PATH"], "GOMAXPROCS": "1"},
        )
        self.client = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def __enter__(self) -> PrometheusServer:
        try:
            self.wait(self._ready, "Prometheus to be ready")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.client.close()
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _ready(self) -> bool:
        assert self._process.poll() is None, Path(self._log.name).read_text()
        try:
            return self.client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def wait(self, what: Any, name: str, wait_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + wait_s
        while not what():
            assert time.monotonic() < deadline, f"{name} did not come to pass within {wait_s:g} s"
            time.sleep(0.2)

    def query(self, text: str) -> list[dict[str, Any]]:
        """The samples that a query has now. An error of it fails the test."""
        answer = self.client.post("/api/v1/query", data={"query": text}).json()
        assert answer["status"] == "success", f"{text}: {answer.get('error')}"
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def value(self, text: str) -> float:
        """The sum of a query's samples; 0 without any."""
        return sum(float(sample["value"][1]) for sample in self.query(text))

    def firing(self) -> dict[str, list[dict[str, str]]]:
        """The labels of the alerts that fire, by name."""
        found: dict[str, list[dict[str, str]]] = {}
        for alert in self.client.get("/api/v1/alerts").json()["data"]["alerts"]:
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], []).append(alert["labels"])
        return found

    def targets(self) -> list[dict[str, Any]]:
        active: list[dict[str, Any]] = self.client.get("/api/v1/targets").json()["data"]["activeTargets"]
        return active
