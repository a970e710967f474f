"""One cluster whose workers go, one after the other, by every way out, while it serves."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.serving import drain_cost as drain
from tests.support import drained_streams
from tests.support.checkpoints import Oracle, compare, make_checkpoint
from tests.support.served_cluster import Answer, Serving, serving, until


@dataclass
class Scene:
    oracle: Oracle
    serving: Serving


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    base = tmp_path_factory.mktemp("drains")
    folder = make_checkpoint(base / "model", "qwen3", seed=23)
    # Steps take their time, so that streams are in their middle when something happens.
    sections = {
        "cache": {"device_tokens": 16384},
        "faults": {"step_delay_s": 0.01},
        "engine": {"threads": 1},
    }
    with serving(folder, base / "run", "--prefill", "1", "--decode", "3", sections=sections) as cluster:
        yield Scene(Oracle(folder), cluster)


@pytest.fixture(autouse=True)
def settled(scene: Scene) -> Iterator[None]:
    yield
    scene.serving.settle()


def prompts(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(300) for _ in range(rng.randint(20, 120))] for _ in range(count)]


class Clients(threading.Thread):
    """Streams beside what the test does; every answer must be the oracle's."""

    def __init__(self, scene: Scene, seed: int, count: int, tokens: int) -> None:
        super().__init__()
        self._scene, self._prompts, self._tokens = scene, prompts(seed, count), tokens
        self.answers: list[Answer] = []
        self.start()

    def run(self) -> None:
        self.answers = self._scene.serving.complete_all(self._prompts, stream=True, max_tokens=self._tokens)

    def finish(self) -> list[Answer]:
        self.join(120)
        assert len(self.answers) == len(self._prompts)
        for prompt, answer in zip(self._prompts, self.answers, strict=True):
            assert compare(self._scene.oracle, prompt, answer.tokens).equal
        return self.answers


def drawn_answers(scene: Scene) -> list[list[int]]:
    """What the cluster says to some prompts with draws and penalties: the same whoever computes it."""
    asked: dict[str, Any] = {"max_tokens": 24, "temperature": 0.9, "seed": 5, "presence_penalty": 0.5}
    return [answer.tokens for answer in scene.serving.complete_all(prompts(9, 6), **asked)]


def running(scene: Scene, name: str) -> None:
    """Wait until this worker has something to do; asked of the router itself, as a command takes its time."""

    def busy() -> bool:
        rows = httpx.get(f"{scene.serving.url}/cluster/status", timeout=60).json()["workers"]
        return any(row["name"] == name and row["running"] > 0 for row in rows)

    until(busy, f"{name} to be busy")


@pytest.mark.slow
def test_d1_streams_of_a_drained_decode_worker_go_on_elsewhere_without_a_failed_or_altered_one(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "drain.json"
    flags = ["--streams", "12", "--input-tokens", "20:120", "--output-tokens", "400", "--victim", "decode-1"]
    flags += ["--after-tokens", "10", "--json", str(out)]
    monkeypatch.setattr(drained_streams, "LOW", 0)
    monkeypatch.setattr(drained_streams, "HIGH", 300)
    assert drain.main(["--url", scene.serving.url, *flags]) == 0
    figures: dict[str, Any] = json.loads(out.read_text())["figures"]
    print(figures)
    assert figures["failed"] == figures["altered"] == figures["started_over"] == 0
    assert figures["migrated"] > 0
    assert scene.serving.status()["decode-1"]["state"] == "left"
    assert scene.serving.metric("twinpool_migrations_total", outcome="migrated") == figures["migrated"]


@pytest.mark.slow
def test_a_worker_changes_its_role_under_load(scene: Scene) -> None:
    before, replays = scene.serving.status()["decode-2"], scene.serving.metric("twinpool_replays_total")
    drawn = drawn_answers(scene)
    clients = Clients(scene, 2, 12, 500)
    running(scene, "decode-2")
    done = scene.serving.twinpool("role", "decode-2", "prefill", timeout=120)
    assert done.returncode == 0, done.stderr
    clients.finish()
    assert scene.serving.metric("twinpool_replays_total") == replays, "it costs nobody a replay"
    after = scene.serving.status()["decode-2"]
    assert (after["role"], after["state"]) == ("prefill", "ready")
    assert after["incarnation"] == before["incarnation"] + 1
    assert after["pid"] == before["pid"], "its process went on, with the weights"

    def it_serves() -> bool:
        answers = scene.serving.complete_all(prompts(3, 8), max_tokens=4)
        return "decode-2" in {a.twinpool["prefill_worker"] for a in answers}

    until(it_serves, "decode-2 to compute prompts")
    assert drawn_answers(scene) == drawn
    again = scene.serving.twinpool("role", "decode-2", "prefill")
    assert again.returncode == 1
    assert "already" in again.stderr
    last = scene.serving.twinpool("role", "decode-0", "prefill")
    assert last.returncode == 1
    assert "last decode worker" in last.stderr


@pytest.mark.slow
def test_d1_sigterm_to_a_worker_is_a_drain(scene: Scene) -> None:
    clients = Clients(scene, 4, 12, 600)
    running(scene, "decode-0")
    os.kill(scene.serving.status()["decode-2"]["pid"], signal.SIGTERM)
    until(lambda: scene.serving.status()["decode-2"]["state"] == "left", "decode-2 to leave")
    assert not any("died" in line and "decode-2" in line for line in scene.serving.lines)
    clients.finish()


@pytest.mark.slow
def test_the_last_one_finishes_what_it_has_and_says_so_in_json(scene: Scene) -> None:
    node = scene.serving.status()["decode-0"]["node"]
    refused = scene.serving.twinpool("drain", node)
    assert refused.returncode == 1
    assert "--force" in refused.stderr
    clients = Clients(scene, 5, 2, 2000)
    running(scene, "decode-0")
    late = scene.serving.twinpool("drain", "decode-0", "--force", "--json", "--watch", "--timeout", "0.2", timeout=120)
    lines = [json.loads(line) for line in late.stdout.splitlines()]
    assert lines[0]["workers"][0]["running"] > 0
    assert "running" in lines[0]["workers"][0]["waits_for"]
    if not lines[-1]["left"]:
        # Nobody else could take them, so they weren't started over; it goes on.
        assert late.returncode == 1
        back = scene.serving.twinpool("undrain", "decode-0")
        assert back.returncode == 0, back.stderr
    clients.finish()
