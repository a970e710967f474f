"""Two hundred changes of weights under load, rolling and in place, with a kill -9 in the middle of each phase of some.

Every answer names its version, and is compared with transformers' greedy answer by the weights of that version. Each
change has a name of its own, so an answer that a version began and another one ended would have two.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.changed_weights import (
    PROMPTS,
    TOKENS,
    Answers,
    Clients,
    ask,
    greedy_answers,
    in_one_version,
    make_versions,
    shown,
    update,
)
from tests.support.changing_cluster import Detached, detached, kill
from tests.support.chaos_control_plane import CONTROLLER
from tests.support.served_cluster import until

UPDATES = int(os.environ.get("TWINPOOL_UPDATES", "200"))
KILL_EVERY, REVERT_EVERY = 4, 9
PHASES, VICTIMS = ("reading", "draining", "starting"), ("prefill-0", "decode-1", "controller")
KILLS = tuple((phase, victim, rolling) for rolling in (False, True) for victim in VICTIMS for phase in PHASES)
"""Phases of a change, whom a kill meets in it, and whether the change is rolling."""
PROBE, CLIENTS = len(PROMPTS) - 1, 4
"""The prompt that no client asks for but the test itself, and how many clients there are."""

WAIT_S = 600.0
"""For a change to be through on a machine that does other things as well."""


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_two_hundred_changes_under_load_and_kills_give_no_answer_of_two_versions(tmp_path: Path) -> None:
    folders = make_versions(tmp_path / "weights")
    answers = greedy_answers(folders)
    sections: dict[str, dict[str, Any]] = {
        "engine": {"weight_roots": str(tmp_path / "weights"), "threads": 1},
        "cluster": {"heartbeat_s": 0.2, "lease_s": 5, "restart_limit": 1000},
        "router": {"worker_wait_s": 300},
        "cache": {"storage.backend": "file", "storage.path": str(tmp_path / "pages")},
    }
    flags = ("--prefill", "1", "--decode", "2")
    with detached(folders["step-0"], tmp_path / "run", *flags, sections=sections) as cluster:
        ChangingWeights(cluster, folders, answers).run()
        cluster.settle()


class ChangingWeights:
    """A cluster whose weights are changed again and again while clients ask."""

    def __init__(self, cluster: Detached, folders: dict[str, Path], answers: dict[str, Answers]) -> None:
        self._cluster, self._folders = cluster, folders
        checkpoint = shown(cluster)["weights_version"]
        self._oracle = {checkpoint: answers["step-0"]}
        """By the version that answers name."""
        self._checkpoint, self._answers = checkpoint, answers
        self._asking = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=600)
        self.met: Counter[tuple[str, str, bool]] = Counter()
        """How many kills met the phase that they were meant for."""

    def run(self) -> None:
        kills = itertools.cycle(KILLS)
        with Clients(self._cluster, self._oracle, CLIENTS, prompts=PROBE) as clients:
            for number in range(1, UPDATES + 1):
                before = len(clients.failed)
                killing = number % KILL_EVERY == 0
                last = shown(self._cluster)["weights_version"]
                version = self._change(number, next(kills) if killing else ("", "", number % 2 == 1))
                assert version != last or killing, f"change {number} was given up"
                self._look(version, new=version != last)
                assert clients.wrong == []
                lost = clients.failed[before:]
                assert not lost or killing, f"change {number} lost answers and killed nobody: {lost}"
                assert all("the weights were changed while it was answered" in words for words in lost), lost
        print(f"{sum(clients.seen.values())} answers of {len(clients.seen)} versions, {len(clients.failed)} lost to "
              f"{sum(self.met.values())} kills: {dict(self.met)}")  # fmt: skip
        assert len(clients.seen) > UPDATES / 2, "most versions have answered clients"
        wanted = KILLS[: UPDATES // KILL_EVERY]
        assert {(phase, victim) for phase, victim, _ in self.met} == {(phase, victim) for phase, victim, _ in wanted}

    def _change(self, number: int, plan: tuple[str, str, bool]) -> str:
        """Change the weights, to the checkpoint's at times, kill somebody in the middle where a phase is given, and
        wait until all workers serve one version. Returns it: the one before, where a kill had the change given up."""
        phase, victim, rolling = plan
        if number % REVERT_EVERY == 0:
            version = self._checkpoint
            order = httpx.post(f"{self._cluster.url}/v1/weights/revert", json={"rolling": rolling, "wait": False})
        else:
            version, folder = f"change-{number}", f"step-{number % len(self._folders)}"
            self._oracle[version] = self._answers[folder]
            order = update(self._cluster, self._folders[folder], version, rolling=rolling, wait=False)
        assert order.status_code == 202, order.text
        pids = self._pids()
        if phase and self._reaches(phase, number):
            self.met[plan] += 1
            if victim == "controller":
                kill(self._cluster.one(CONTROLLER))
            else:
                os.kill(pids[victim], signal.SIGKILL)
        until(lambda: self._is_one(version, number), f"change {number} to be through", WAIT_S)
        return str(shown(self._cluster)["weights_version"])

    def _reaches(self, phase: str, number: int) -> bool:
        """Wait for a phase of a change; returns whether it was seen before the change was through."""

        def seen() -> bool:
            now = shown(self._cluster)
            states = {row["state"] for row in now["workers"]}
            return {
                "reading": now["pending"] is not None,
                "draining": bool(now["behind"]) and "draining" in states,
                "starting": now["pending"] is None and "starting" in states,
            }[phase]

        def over() -> bool:
            now = shown(self._cluster)
            return now["tried"] >= number and now["pending"] is None and not now["behind"]

        found = False

        def either() -> bool:
            nonlocal found
            found = found or seen()
            return found or over()

        until(either, phase, WAIT_S)
        return found

    def _is_one(self, wanted: str, number: int) -> bool:
        """Whether all workers serve one version: the wanted one, unless a kill had the change given up."""
        now = shown(self._cluster)
        as_told = now["weights_version"] == wanted or bool(now["failed"])
        return now["tried"] >= number and in_one_version(now) and as_told

    def _look(self, version: str, *, new: bool) -> None:
        """Ask for what only versions before a `new` one have computed: nothing is found, and the answer is this one's;
        asked again, what this one has computed is found."""
        body = {"model": self._cluster.model, "prompt": PROMPTS[PROBE], "max_tokens": TOKENS, "temperature": 0}
        cached = []
        for _ in range(2):
            told = httpx.post(f"{self._cluster.url}/v1/completions", json=body, timeout=600)
            assert told.status_code == 200, told.text
            cached.append(told.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert not (new and cached[0]), f"{version} has read pages of another version"
        assert cached[1] > 0
        assert ask(self._asking, self._cluster.model, PROBE) == (version, self._oracle[version][PROBE])

    def _pids(self) -> dict[str, int]:
        told = httpx.get(f"{self._cluster.url}/cluster/status", timeout=60).json()
        return {row["name"]: row["pid"] for row in told["workers"]}
