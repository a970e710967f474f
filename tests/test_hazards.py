"""Every hazard in A, B and C, and D1 to D6, has a test that bears its name; and some of those tests."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from contracts.clock import ManualClock
from contracts.errors import PeerDead
from contracts.ids import Role
from contracts.sampling import SamplingParams
from decode import DecodeWorker
from prefill import PrefillWorker
from tests.router.stage import Stage
from tests.workers.test_any_state import hash_pair

TESTS = Path(__file__).parent
HAZARDS = [f"{group}{n}" for group, last in (("a", 12), ("b", 10), ("c", 11), ("d", 6)) for n in range(1, last + 1)]


def test_every_hazard_has_a_test_that_bears_its_name() -> None:
    named: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        named |= set(re.findall(r"^\s*(?:async )?def test_([a-d]\d+)_", path.read_text(), re.MULTILINE))
    assert [hazard for hazard in HAZARDS if hazard not in named] == []
    assert not [name for name in named if name not in HAZARDS and name[0] != "d"], "there is no such hazard"


@pytest.mark.slow
def test_c6_a_request_is_in_exactly_one_queue_whatever_happens_to_it() -> None:
    """Its phase names the queue; both workers recount that after every step of a random life."""
    rng = random.Random(3)
    with hash_pair("full", dict.fromkeys(Role, 40), prefill={"chunk_tokens": 8}) as both:
        alive = []
        for _ in range(150):
            if rng.random() < 0.2:
                prompt = [rng.randrange(300) for _ in range(rng.randint(1, 30))]
                alive.append(both.submit(prompt, SamplingParams(max_tokens=6, temperature=0.0)))
            if alive and rng.random() < 0.1:
                legs = rng.choice([(Role.PREFILL, Role.DECODE), (Role.PREFILL,), (Role.DECODE,)])
                both.cancel(rng.choice(alive), legs)
            both.step(rng.choice(list(Role)))
            assert both.prefill.check().violations == both.decode.check().violations == ()
        for rid in alive:
            both.cancel(rid)


def test_c6_a_request_in_two_queues_is_found() -> None:
    with hash_pair("full", dict.fromkeys(Role, 40)) as both:
        request = both.submit(list(range(9)), SamplingParams(max_tokens=20, temperature=0.0))
        while len(both.answers[request].tokens) < 3:
            both.step()
        assert isinstance(both.decode, DecodeWorker)
        (running,) = both.decode._running
        both.decode._waiting.append(running)
        assert any("in that queue" in v for v in both.decode.check().violations)
        both.decode._waiting.clear()
        assert isinstance(both.prefill, PrefillWorker)
        both.cancel(request)


def test_c7_a_worker_gets_nothing_before_it_has_registered_and_is_reached() -> None:
    stage = Stage()
    stage.kill("decode-0")
    stage.cluster["decode-0"].restart()
    stage.cluster["decode-0"].state = "starting"
    stage.view()
    stage.link("decode-0")
    for _ in range(4):
        stage.submit()
    assert {w[0] for w, _ in stage.submits if w[0].startswith("decode")} == {"decode-1"}
    stage.cluster["decode-0"].state = "ready"
    stage.view()
    stage.submit()
    assert stage.submits[-2][0][0] == "decode-0"


def test_c7_a_worker_is_not_there_before_all_of_its_ranks_are() -> None:
    """Its leader waits for the others before it builds anything, and ends when one doesn't come."""
    from cluster.rank_line import LeaderLine, RankLine

    secret = "5a" * 32
    clock = ManualClock()
    line = RankLine(secret, 3, clock, 1.0)
    first = LeaderLine(secret, 1)
    try:
        clock.advance(1.0)
        with pytest.raises(PeerDead, match="of 3 did not come within 0 s"):
            line.meet(0.0)
    finally:
        first.close()
        line.close()
