"""Upgrades, under load, to builds that compute otherwise or that can't hand over to the one before.

Each build is an environment of its own with a changed copy of the source. What a build answers is told by a cluster of
that build alone; every answer of the cluster that is upgraded must be one of the two, logprob by logprob, to the end.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.changing_cluster import (
    UPGRADE_S,
    WAIT_S,
    Load,
    SourceEdit,
    another_build,
    detached,
    ready,
    some_prompts,
)
from tests.support.checkpoints import Oracle, compare, make_checkpoint
from tests.support.served_cluster import Answer, Serving, serving, until
from twinpool.contracts.build_id import build_of

QUARTERS = 4
STEP_S = 0.15
LONG = 2000
"""Tokens of a long answer: `STEP_S` each, minutes."""
LONG_S = 1200.0
"""Seconds that such an answer may take on a busy machine."""
SHORT_BOUND = 20
"""Seconds that a command waits for a worker: more than a restart takes, and less than a long answer."""
SECTIONS: dict[str, dict[str, Any]] = {
    "cache": {"device_tokens": 24576},
    "prefill": {"chunk_tokens": 128},
    "cluster": {"lease_s": 8},
    "router": {"request_timeout_s": LONG_S},
}
FLAGS = ("--prefill", "2", "--decode", "2", "--routers", "2")
_LANES = "    x += rotated<{}>(x);\n"
EIGHT_FIRST, ONE_FIRST = ("".join(_LANES.format(width) for width in order) for order in ((8, 4, 2, 1), (1, 2, 4, 8)))
PINNED = """
import os
os.environ.update(ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="AVX2")
"""


@dataclass(frozen=True)
class OtherBuild:
    """What differs in a build, and whether its numbers do."""

    edits: tuple[SourceEdit, ...] = ()
    at_start: str = ""
    bits_differ: bool = False


BUILDS = {
    # A kernel that adds in another order, as norms do.
    "kernel": OtherBuild((SourceEdit("engine/native/vector.h", EIGHT_FIRST, ONE_FIRST),), "", True),
    # Libraries that take fewer instructions.
    "libraries": OtherBuild((), PINNED, True),
    "protocol": OtherBuild((SourceEdit("contracts/messages/fingerprint.py", "PROTOCOL = 4\n", "PROTOCOL = 5\n"),)),
    "layout": OtherBuild((SourceEdit("transfer/rooms/peers.py", "sort_keys=True)", "sort_keys=True) + 'padded'"),)),
}

Told = tuple[tuple[int, ...], tuple[float, ...]]
"""The tokens of an answer and the logprob of each."""


def told(answer: Answer) -> Told:
    assert answer.logprobs is not None
    return tuple(answer.tokens), tuple(answer.logprobs["token_logprobs"])


def answers_of_one_build(
    folder: Path, runtime: Path, prompts: Sequence[Sequence[int]], long: Sequence[Sequence[int]], python: Path | None
) -> tuple[list[Told], list[Told]]:
    """What a cluster of one build alone says to each prompt, short and long."""
    sections = SECTIONS | {"transfer": {"plane": "local"}}
    with serving(folder, runtime, sections=sections, python=python, ready_within=UPGRADE_S, orderly=False) as alone:
        short = alone.complete_all(prompts, max_tokens=48, logprobs=0)
        return [told(a) for a in short], [told(a) for a in alone.complete_all(long, max_tokens=LONG, logprobs=0)]


class LongAnswers:
    """Two long answers at once. Drained, a decode worker hands its own to the other one while that is of its build, so
    that the last one of a build has both."""

    def __init__(self, cluster: Serving, prompts: Sequence[Sequence[int]]) -> None:
        self.ended: list[Told | None] = [None for _ in prompts]
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._ask, args=(cluster, n, p)) for n, p in enumerate(prompts)]

    def _ask(self, cluster: Serving, number: int, prompt: Sequence[int]) -> None:
        body = cluster.body(prompt, max_tokens=LONG, logprobs=0)
        try:
            response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=LONG_S)
            assert response.status_code == 200, response.text
            choice = response.json()["choices"][0]
            self.ended[number] = tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"])
        except (AssertionError, httpx.HTTPError) as error:
            self.failures.append(f"{type(error).__name__}: {error}")

    @contextmanager
    def running(self, cluster: Serving) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        count = len(self._threads)
        until(lambda: bool(self.failures) or sum(self._running(cluster)) >= count, "long answers to run", WAIT_S)
        assert not self.failures
        try:
            yield
        finally:
            for thread in self._threads:
                thread.join(LONG_S)

    @staticmethod
    def _running(cluster: Serving) -> list[int]:
        return [row["running"] for name, row in cluster.status().items() if name.startswith("decode-")]

    @property
    def under_way(self) -> bool:
        return None in self.ended


def differing(ours: Told, theirs: Told) -> list[int]:
    """How many of an answer's logprobs differ, in each quarter of it: of all those after a cut as well, so that no cut
    between the first and the last quarter goes unseen."""
    each = [a != b for a, b in zip(ours[1], theirs[1], strict=True)]
    size = -(-len(each) // QUARTERS)
    return [sum(each[at : at + size]) for at in range(0, len(each), size)]


def upgrade_until_it_drains(cluster: Serving, python: Path) -> str:
    """Begin an upgrade, and go on with it after each time that a start took longer than the bound, until it says that a
    decode worker's answers take longer; returns what was said."""
    for _ in range(10):
        words = ("upgrade", "--python", str(python), "--timeout", str(SHORT_BOUND))
        done = cluster.twinpool(*words, timeout=UPGRADE_S)
        print(done.stdout, done.stderr)
        assert done.returncode == 1, done.stdout + done.stderr
        if "drains and waits" in done.stderr and "decode-" in done.stderr:
            return done.stdout + done.stderr
        assert "should serve" in done.stderr or "which is" in done.stderr
    raise AssertionError("no upgrade came to its bound")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("which", BUILDS)
def test_an_upgrade_to_a_build_that_differs_keeps_each_answer_in_one(tmp_path: Path, which: str) -> None:
    other = BUILDS[which]
    folder = make_checkpoint(tmp_path / "model", "qwen3", seed=76, context=16384)
    python = another_build(tmp_path / "another", *other.edits, at_start=other.at_start)
    prompts, rng = some_prompts(76, 6), random.Random(76)
    long = [[rng.randrange(300) for _ in range(200 + n)] for n in range(2)]
    here = answers_of_one_build(folder, tmp_path / "here", prompts, long, None)
    there = answers_of_one_build(folder, tmp_path / "there", prompts, long, python)
    oracle = Oracle(folder)
    for prompt, (tokens, _) in zip(prompts * 2, here[0] + there[0], strict=True):
        assert compare(oracle, prompt, tokens).equal
    for ours, theirs in zip(here[0] + here[1], there[0] + there[1], strict=True):
        if other.bits_differ:
            parts = differing(ours, theirs)
            print(f"{which}: {len(ours[0])} tokens; logprobs that differ, by quarter: {parts}")
            assert min(parts) > 0, "the two builds compute alike, and this test would prove nothing"
        else:
            assert ours == theirs

    sections = SECTIONS | {"faults": {"step_delay_s": STEP_S}}
    with detached(folder, tmp_path / "run", *FLAGS, sections=sections, ready_within=UPGRADE_S) as cluster:
        load, streams = (
            Load(cluster.url, cluster.model, prompts, more_fields={"logprobs": 0}),
            LongAnswers(cluster, long),
        )
        with streams.running(cluster), load.running():
            load.more()
            said = upgrade_until_it_drains(cluster, python)
            assert streams.under_way, "the bound is shorter than the answers"
            if other.bits_differ:
                assert "can't go on with each other's requests (numerics)" in said
            for part in ("none of the decode workers that serve", "the cluster serves on", "The same command goes on"):
                assert part in said
            load.more()
            again = cluster.twinpool("upgrade", "--python", str(python), timeout=UPGRADE_S)
            print(again.stdout, again.stderr)
            assert again.returncode == 0, again.stdout + again.stderr
            load.more()
        assert not streams.failures
        assert {row["build"] for row in cluster.status().values()} == {build_of(python.parents[2] / "source")}
        ready(cluster, prefill=2, decode=2)
        assert not load.failures, load.failures[:5]
        counts = [0, 0]
        for number, answer in load.answers:
            mine = [told(answer) == of[0][number] for of in (here, there)]
            assert any(mine), f"an answer to prompt {number} of neither build"
            counts[mine.index(True)] += 1
        print(f"{which}: {counts[0]} answers of the build before, {counts[1]} of the next")
        assert streams.ended == here[1]
        cluster.settle()
