"""Hazards of routing: what the router remembers has a bound and can be lost, and every request says where its time
went. (D7, the heavy work of one request, is in test_completions and test_readers.)"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.router.http_server import Server
from tests.router.stage import Stage
from twinpool.contracts.ids import Role
from twinpool.router.kv_indexer.prefix_indexes import SentPrefixes
from twinpool.router.state.prefix_hashes import BLOCK_TOKENS, prefix_hashes


def prompt(number: int, blocks: int = 4) -> tuple[int, ...]:
    rng = random.Random(number)
    return tuple(rng.randrange(1000) for _ in range(blocks * BLOCK_TOKENS))


def test_d8_what_was_sent_is_remembered_within_a_bound_and_the_oldest_is_forgotten() -> None:
    memory = SentPrefixes(sent_bytes=6400, recent_blocks=320)
    stage = Stage()
    memory.follow(stage.core.workers)
    key = stage.key("prefill-0")
    (slot,) = memory.slots(key)
    for number in range(500):
        memory.sent(key, prefix_hashes(prompt(number)), 0.0)
        assert memory.table.entries <= memory.table.memory.size.entries == 320
    known = [n for n in range(500) if memory.find(prefix_hashes(prompt(n)))[slot]]
    assert min(known) > 300
    assert set(range(480, 500)) <= set(known)
    assert memory.table.check() == []


def test_d8_what_was_remembered_of_a_worker_dies_with_its_incarnation_and_is_learnt_again() -> None:
    """The memory is a guess that follows what is sent: after any loss it is right again with the next request."""
    stage = Stage()
    for _ in range(3):
        stage.submit(prompt=prompt(1), max_tokens=1)
    holders = [w[0] for w, s in stage.submits if len(s.tokens) == len(prompt(1))]
    holder = max(set(holders), key=holders.count)
    keys, indexes = prefix_hashes(prompt(1)), stage.core.indexes
    assert indexes.hits(keys, stage.clock.now()).held[stage.key(holder)] == len(prompt(1))
    stage.kill(holder)
    stage.cluster[holder].restart()
    stage.view()
    stage.link(holder)
    assert stage.key(holder) not in indexes.hits(keys, stage.clock.now()).held
    indexes.sent(stage.key(holder), keys, stage.clock.now())
    assert indexes.hits(prefix_hashes(prompt(1)), stage.clock.now()).held[stage.key(holder)] == len(prompt(1))


STAGES = {"tokenise", "queue", "prefill", "transfer", "hidden", "exposed", "decode", "first_token", "total"}
MARKS = {Role.PREFILL: {"queue", "match", "prefill"}, Role.DECODE: {"grant", "arrived", "first_step", "done"}}
"""What the stand-ins' legs tell: each must reach the client under its own name."""


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_d10_every_answer_carries_its_timeline_stage_by_stage(server: Server, path: str, stream: bool, n: int) -> None:
    body: dict[str, Any] = {"max_tokens": 4, "seed": 1, "n": n}
    body |= {"prompt": [5, 6, 7]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hello"}]}
    if stream:
        *_, last, done = server.stream(path, body, **{"X-Twinpool-Timeline": "1"})
        assert done == "[DONE]"
        assert isinstance(last, dict)
        told = last["twinpool"]
    else:
        told = server.post(path, body, **{"X-Twinpool-Timeline": "1"}).json()["twinpool"]
    journeys = [told] if n == 1 else told
    assert len(journeys) == n
    for journey in journeys:
        line = journey["timeline"]
        assert set(line) == STAGES
        assert MARKS[Role.PREFILL] <= set(line["prefill"])
        assert MARKS[Role.DECODE] <= set(line["decode"])
        assert line["transfer"] == 0.002, "from the grant to what arrived, as decode told it"
        assert 0 <= line["queue"] <= line["first_token"] <= line["total"]
        assert line["tokenise"] <= line["first_token"]
        assert {"cached_by_tier", "held_by_decode", "transfer_bytes", "prefill_worker", "decode_worker"} <= set(journey)


def test_d10_a_request_without_the_header_carries_none(server: Server) -> None:
    assert "twinpool" not in server.complete(max_tokens=2)
