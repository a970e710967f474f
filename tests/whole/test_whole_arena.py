"""A whole cluster whose workers are killed: what their host memory still has is not computed again."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.arena_tampering import agent_of, damage_last_page, segments, tear_record
from tests.support.checkpoints import Oracle, compare, make_checkpoint
from tests.support.served_cluster import Serving, serving, until

PAGE = 16
COUNT = 12
SAID = 24


@dataclass
class Talks:
    """Conversations with a cluster, each answer compared with the oracle's."""

    cluster: Serving
    oracle: Oracle
    rng: random.Random
    prompts: list[list[int]] = field(default_factory=list)

    def begin(self, count: int, length: int) -> None:
        self.prompts = [[self.rng.randrange(1, 300) for _ in range(length)] for _ in range(count)]

    def turn(self) -> tuple[int, int, dict[str, int]]:
        """One turn of each: tokens asked for, tokens computed, and tokens found on the host and held by decode."""
        answers = self.cluster.complete_all(self.prompts, max_tokens=COUNT)
        found = {"host": 0, "held": 0}
        for prompt, answer in zip(self.prompts, answers, strict=True):
            assert compare(self.oracle, prompt, answer.tokens).equal
            found["host"] += answer.twinpool["cached_by_tier"]["host"]
            found["held"] += answer.twinpool["held_by_decode"]
        asked, computed = sum(map(len, self.prompts)), sum(a.twinpool["computed"]["prefill"] for a in answers)
        for prompt, answer in zip(self.prompts, answers, strict=True):
            prompt += [*answer.tokens, *[self.rng.randrange(1, 300) for _ in range(SAID)]]
        until(lambda: not any(w["running"] or w["waiting"] for w in self.workers().values()), "rest")
        return asked, computed, found

    def workers(self) -> dict[str, dict[str, Any]]:
        """As `Serving.status`, without a process for each question."""
        rows = httpx.get(f"{self.cluster.url}/cluster/status", timeout=60).json()["workers"]
        return {row["name"]: row for row in rows}

    def counters(self, worker: str) -> dict[str, float]:
        counters: dict[str, float] = self.workers()[worker]["counters"]
        return counters

    def kill(self, worker: str) -> None:
        """With everything at rest, and wait for its successor."""
        before = self.workers()[worker]
        os.kill(before["pid"], signal.SIGKILL)

        def back() -> bool:
            now = self.workers()[worker]
            return bool(now["incarnation"] > before["incarnation"] and now["state"] == "ready" and now["pages_total"])

        until(back, f"{worker} to come back", 120)
        # The router counts on it once it has heard what it took over.
        until(lambda: "arena_pages_adopted" in self.counters(worker), "its first word")


def sections(**prefill: Any) -> dict[str, dict[str, Any]]:
    return {
        "cache": {"page_tokens": PAGE, "device_tokens": 8192, "host_bytes": 24 << 20, "load_back": "always"},
        "prefill": {"chunk_tokens": 128, **prefill},
        "engine": {"threads": 1},
        # What is found again is counted exactly, and an audit takes pages.
        "audit": {"fraction": 0},
    }


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talks]:
    base = tmp_path_factory.mktemp("arena")
    folder = make_checkpoint(base / "model", "qwen3", seed=23)
    with serving(folder, base / "run", sections=sections()) as cluster:
        yield Talks(cluster, Oracle(folder), random.Random(3))
        cluster.settle()
        assert segments(cluster).keys() == {"prefill-0.0", "decode-0.0"}


def most(asked: int, talks: Talks) -> int:
    """What is computed of a turn when nothing is lost: the last answer, what was said since, and a page's rest each."""
    return len(talks.prompts) * (COUNT + SAID + 2 * PAGE)


@pytest.mark.slow
def test_after_both_kinds_of_worker_were_killed_the_next_turns_compute_what_is_new_and_little_more(
    talks: Talks,
) -> None:
    talks.begin(4, 200)
    asked, computed, _ = talks.turn()
    assert computed == asked, "all of it is new"
    talks.kill("prefill-0")
    assert talks.counters("prefill-0")["arena_pages_adopted"] >= 4 * (200 // PAGE)
    asked, computed, found = talks.turn()
    print(f"after prefill's death: {computed} of {asked} tokens computed, {found}")
    assert computed <= most(asked, talks) < asked / 2
    assert found["host"] == asked - computed
    talks.kill("decode-0")
    assert talks.counters("decode-0")["arena_pages_adopted"] > 0
    asked, computed, found = talks.turn()
    print(f"after decode's death: {computed} of {asked} tokens computed, {found}")
    assert computed <= most(asked, talks)
    assert found["held"] >= asked - most(asked, talks), "decode was sent only what was new"
    assert talks.counters("decode-0")["hit_tokens_host"] == found["held"]


@pytest.mark.slow
def test_a9_what_was_damaged_in_the_arena_is_found_counted_and_computed_again(talks: Talks) -> None:
    talks.begin(3, 180)
    talks.turn()
    damage_last_page(talks.cluster, "prefill-0")
    tear_record(talks.cluster, "prefill-0", 0)
    talks.kill("prefill-0")
    asked, computed, _ = talks.turn()
    counters = talks.counters("prefill-0")
    print({name: count for name, count in counters.items() if name.startswith("arena")})
    assert counters["arena_records_torn"] == 1
    until(
        lambda: sum(talks.counters("prefill-0")[name] for name in ("arena_pages_damaged", "pages_damaged_on_host")) > 0,
        "the damage to be found", 30,
    )  # fmt: skip
    assert computed < asked


@pytest.mark.slow
def test_an_agent_that_is_killed_takes_nothing_along_that_somebody_still_has(talks: Talks) -> None:
    talks.begin(2, 150)
    talks.turn()
    agent = agent_of(talks.cluster)
    agent.kill()
    until(lambda: any("arena agent died" in line for line in talks.cluster.lines), "the agent to be missed")
    until(lambda: len(segments(talks.cluster)) == 2, "the segments to come back")
    assert talks.turn()[1] <= most(0, talks)
    talks.kill("prefill-0")
    asked, computed, _ = talks.turn()
    assert computed <= most(asked, talks)


@pytest.mark.soak
@pytest.mark.slow
def test_a_worker_of_two_ranks_takes_over_what_both_have_or_nothing(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", seed=31)
    with serving(folder, tmp_path / "run", sections=sections(tp=2)) as cluster:
        talks = Talks(cluster, Oracle(folder), random.Random(5))
        talks.begin(3, 200)
        talks.turn()
        assert segments(cluster).keys() == {"prefill-0.0", "prefill-0.1", "decode-0.0"}
        talks.kill("prefill-0")
        assert talks.counters("prefill-0")["arena_pages_adopted"] >= 3 * (200 // PAGE)
        asked, computed, found = talks.turn()
        assert computed <= most(asked, talks) < asked / 2
        assert found["host"] == asked - computed
        assert talks.counters("prefill-0")["arena_pages_damaged"] == 0
        cluster.settle()
