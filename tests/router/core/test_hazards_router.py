"""Hazards of routing: what the router remembers has a bound and can be lost, and every request says where its time
went. (D7, the heavy work of one request, is in test_completions and test_readers.)"""

from __future__ import annotations

import random
from typing import Any

import pytest

from contracts.ids import Role
from router.kv_indexer import worker_indexes
from router.state.prefix_hashes import PREFIX_BLOCK_TOKENS, prefix_hashes
from tests.router.http_server import Server
from tests.router.stage import Stage


def prompt(number: int, blocks: int = 4) -> tuple[int, ...]:
    rng = random.Random(number)
    return tuple(rng.randrange(1000) for _ in range(blocks * PREFIX_BLOCK_TOKENS))


def test_d8_what_a_worker_is_remembered_to_hold_has_a_bound_and_forgets_the_oldest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_indexes, "BLOCKS_IN_ALL", 160)
    stage = Stage()
    index = stage.core.indexes.of(stage.key("prefill-0"))
    assert index.at_most == 40, "four workers share"
    for number in range(500):
        index.sent(prefix_hashes(prompt(number)))
        assert len(index.blocks) <= 40
    assert [index.overlap(prefix_hashes(prompt(n))) for n in (0, 489, 490, 499)] == [0, 0, 4, 4]
    # One prompt alone may be longer than the whole memory: its head is what is kept, as a match begins there.
    long = prefix_hashes(prompt(1000, blocks=60))
    index.sent(long)
    assert len(index.blocks) == 40
    assert index.overlap(long) == 40


def test_d8_what_was_remembered_of_a_worker_dies_with_its_incarnation_and_is_learnt_again() -> None:
    """The memory is a guess that follows what is sent: after any loss it is right again with the next request."""
    stage = Stage()
    for _ in range(3):
        stage.submit(prompt=prompt(1), max_tokens=1)
    holders = [w[0] for w, s in stage.submits if len(s.tokens) == len(prompt(1))]
    holder = max(set(holders), key=holders.count)
    index = stage.core.indexes.of(stage.key(holder))
    keys = prefix_hashes(prompt(1))
    assert index.overlap(keys) * PREFIX_BLOCK_TOKENS == len(prompt(1))
    stage.kill(holder)
    stage.cluster[holder].restart()
    stage.view()
    stage.link(holder)
    fresh = stage.core.indexes.of(stage.key(holder))
    assert fresh is not index
    assert fresh.overlap(keys) == 0
    assert not fresh.blocks
    fresh.sent(keys)
    assert fresh.overlap(keys) * PREFIX_BLOCK_TOKENS == len(prompt(1))


def test_d8_the_guess_found_by_halving_is_that_found_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains that share heads, a memory that always overflows: never is a tail remembered without its head."""
    monkeypatch.setattr(worker_indexes, "BLOCKS_IN_ALL", 100)
    stage = Stage()
    index = stage.core.indexes.of(stage.key("prefill-0"))
    rng = random.Random(7)
    heads = [prompt(n, blocks=6) for n in range(4)]
    chains = [prefix_hashes(rng.choice(heads)[: 64 * rng.randint(1, 6)] + prompt(100 + n)) for n in range(40)]
    for _ in range(400):
        asked = rng.choice(chains)
        blocks = 0
        while blocks < len(asked) and asked[blocks] in index.blocks:
            blocks += 1
        assert index.overlap(asked) == blocks
        if rng.random() < 0.6:
            index.sent(rng.choice(chains))


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
