"""Workers that share their experts: answers are those of workers that have all, and each is drained, migrated and
retracted like any other."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import Oracle
from tests.support.layout_scenes import check_answers, check_retracted
from tests.support.model_families import EVERY
from tests.support.rank_followers import RankProcesses
from tests.support.sharing_worker import SharingWorker, sharing_worker
from tests.support.stepped_cluster import company, generated
from tests.support.worker_pair import SESSION, Answer, Pair, counts_for, pair, turns
from tests.workers.test_drafts import DRAFTS, answers, said
from tests.workers.test_pair import expect_equal, greedy, prompts
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import PeerDead
from twinpool.contracts.ids import Incarnation, RequestId, Role, RoomId, WorkerName
from twinpool.contracts.messages.router_commands import PeerRef, Submit
from twinpool.contracts.messages.worker_events import Done, Tokens

SECTIONS: dict[str, Any] = {
    "transfer": {"plane": "shm"}, "engine": {"threads": 1}, "prefill": {"chunk_tokens": 64}, "decode": {"dp": 2},
}  # fmt: skip
SHARED = {"dp": 2}


@contextmanager
def sharing_pair(folder: Path) -> Iterator[tuple[Pair, SharingWorker]]:
    """A plain prefill worker and two decode workers that share their experts, the second one in another process."""
    sections = {**SECTIONS, "decode": {"prefix_offer_bytes": 0, **SECTIONS["decode"]}}
    config = config_from_dict(sections)
    counts = counts_for(folder, config, Role.DECODE, 2048)
    with (
        sharing_worker(folder, Role.DECODE, config, counts) as other,
        pair(folder, tokens=2048, settle=False, sharers={Role.DECODE: other.dp}, **sections) as both,
    ):
        assert other.pipe.poll(60)
        other.control = other.pipe.recv()
        yield both, other


class Elsewhere:
    """Requests whose answers the other process computes."""

    def __init__(self, both: Pair, other: SharingWorker) -> None:
        self._both, self._other = both, other
        self.answers: dict[RequestId, Answer] = {}

    def submit(self, prompt: list[int], count: int) -> Answer:
        number = len(self.answers)
        rid, room = RequestId(f"other-{number}"), RoomId(f"other-room-{number}")
        answer = self.answers[rid] = self._both.answers[rid] = Answer()
        names = WorkerName("decode-1"), WorkerName("prefill-0")
        peers = PeerRef(names[0], Incarnation(1), ""), PeerRef(names[1], Incarnation(1), self._both.prefill.control)
        first, second = (Submit(rid, 0, room, tuple(prompt), len(prompt), greedy(count), peer) for peer in peers)
        self._both.prefill.handle(SESSION, first)
        self._other.handle(SESSION, second)
        return answer

    def step(self) -> None:
        """A round of both processes, as far as this one sees the other."""
        self._both.step()
        for event in self._other.hear():
            answer = self.answers[event.request_id]
            if isinstance(event, Tokens):
                answer.tokens |= {event.position + i: token for i, token in enumerate(event.tokens)}
            elif isinstance(event, Done):
                answer.done = event

    def until(self, what: Callable[[], bool]) -> None:
        for _ in turns(20_000):
            if what():
                return
            self.step()
        raise AssertionError("it never came to that")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v32"])
def test_two_processes_share_their_experts_and_leave_together(tmp_path: Path, family: str) -> None:
    """One of them idle, both with unequal rows, one drained before the other."""
    folder = EVERY[family](tmp_path / "model")
    oracle = Oracle(folder)
    with sharing_pair(folder) as (both, other):
        elsewhere = Elsewhere(both, other)
        mine, theirs = prompts(1, 17, 97, 40), prompts(2, 70)
        (alone,) = both.run(both.submit(mine[0], greedy(6)))
        expect_equal(oracle, mine[0], alone)
        asked = [both.submit(prompt, greedy(8)) for prompt in mine]
        there = elsewhere.submit(theirs[0], 20)
        elsewhere.until(lambda: there.done is not None and all(both.answers[rid].done for rid in asked))
        for prompt, rid in zip(mine, asked, strict=True):
            expect_equal(oracle, prompt, both.answers[rid])
        expect_equal(oracle, theirs[0], there)

        both.decode.drain()
        for _ in range(3):
            both.step()
        assert not both.decode.drained, "the other one needs its experts"
        later = elsewhere.submit(theirs[0], 5)
        elsewhere.until(lambda: later.done is not None)
        expect_equal(oracle, theirs[0], later)
        other.drain()
        elsewhere.until(lambda: both.decode.drained)
        elsewhere.until(lambda: other.end is not None)
        assert other.end is not None
        counters, violations, whole = other.end
        assert violations == ()
        assert whole
        assert counters["dp_steps"] == both.decode.status().counters["dp_steps"]
        assert 0 < counters["dp_idle_steps"] < counters["dp_steps"], "it had steps of its own, and others"
        both.settle()


@pytest.mark.slow
def test_the_death_of_one_ends_the_steps_of_the_other(tmp_path: Path) -> None:
    with sharing_pair(EVERY["qwen3_moe"](tmp_path / "model")) as (both, other):
        rid = both.submit(prompts(1, 20)[0], greedy(400))
        Elsewhere(both, other).until(lambda: len(both.answers[rid].tokens) > 3)
        os.kill(other.process.pid, signal.SIGKILL)
        with pytest.raises(PeerDead, match="gone"):
            both.run(rid)


@pytest.mark.slow
def test_a_prefill_pool_may_share_its_experts_and_the_decode_pool_not(tmp_path: Path, warm: RankProcesses) -> None:
    check_answers(EVERY["deepseek_v32"](tmp_path / "model"), warm, SHARED, {})


@pytest.mark.slow
def test_retracted_requests_come_back_with_all_their_state(tmp_path: Path, warm: RankProcesses) -> None:
    folder = EVERY["qwen3_moe"](tmp_path / "model")
    check_retracted(folder, Oracle(folder), warm, SHARED)


@pytest.mark.slow
def test_drafts_by_lookup_change_no_answer_and_no_log_probability(tmp_path: Path) -> None:
    folder = EVERY["qwen3_moe"](tmp_path / "model")
    plain, _ = answers(folder, decode={"speculation": "off"})
    found, counters = answers(folder, decode=DRAFTS | SHARED, transfer={"plane": "shm"})
    assert said(found) == said(plain)
    assert 0 < counters["drafts_accepted"] < counters["tokens_drafted"]


@pytest.mark.slow
def test_requests_migrate_between_workers_of_two_groups(tmp_path: Path) -> None:
    folder = EVERY["qwen3_moe"](tmp_path / "model")
    oracle, asked = Oracle(folder), prompts(3, 70, 38)
    with company(folder, tokens=4096, decode=dict(SHARED)) as c:
        rids = [c.submit(prompt, greedy(20)) for prompt in asked]
        for rid in rids:
            c.until(generated(c, rid, 5), "it to run")
            assert c.core.migrations.begin(c.told[rid].request)
            c.act()
        c.until(lambda: c.core.migrations.counts.migrated == 2, "both to move")
        answers = c.run(*rids)
        for prompt, answer in zip(asked, answers, strict=True):
            assert answer == oracle.generate(prompt, 20)
        assert all(not told.replays for told in c.told.values())
