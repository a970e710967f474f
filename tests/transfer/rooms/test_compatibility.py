"""Two workers that differ where it matters never hand over, and both hear what the difference is."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.support.pool_sets import pool_sets
from tests.support.room_ends import ends
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.messages.fingerprint import PROTOCOL, Fingerprint, mismatch, numerics_class
from twinpool.transfer.rooms import room_messages as m
from twinpool.transfer.rooms.peers import fingerprint
from twinpool.transfer.rooms.room_states import HandoverFailed, PromptArrived

SPEC = pool_sets()["full"]
MINE = fingerprint("a model", SPEC, numerics_class("invariant", "avx2"))
OTHERS = {
    "protocol": replace(MINE, protocol=PROTOCOL + 1),
    "layout": replace(MINE, layout="another layout"),
    "weights": replace(MINE, weights="another model"),
    "numerics": replace(MINE, numerics=numerics_class("invariant", "avx512")),
}


@pytest.mark.parametrize("field", OTHERS)
def test_what_differs_is_named_with_both_sides(field: str) -> None:
    other = OTHERS[field]
    for ours, theirs in ((MINE, other), (other, MINE)):
        said = mismatch(ours, theirs, "prefill-0", "decode-7")
        assert said is not None
        assert said.startswith(f"{field}: prefill-0 ")
        assert "decode-7" in said
        assert str(getattr(ours, field)) in said
        assert str(getattr(theirs, field)) in said


def test_under_fast_another_class_is_allowed_and_nothing_else() -> None:
    def fast(by: str) -> Fingerprint:
        return replace(MINE, numerics=numerics_class("fast", by))

    assert mismatch(MINE, MINE, "a", "b") is None
    assert mismatch(fast("avx2"), fast("avx512"), "a", "b") is None
    for field, other in OTHERS.items():
        if field != "numerics":
            assert mismatch(fast("avx2"), replace(other, numerics=fast("avx512").numerics), "a", "b") is not None
    # One that promises exact tokens meets none that doesn't.
    assert mismatch(MINE, fast("avx2"), "a", "b") is not None
    assert mismatch(fast("avx2"), MINE, "a", "b") is not None


def test_the_layout_of_a_fingerprint_is_that_of_all_ranks() -> None:
    full, other = pool_sets()["full"], pool_sets()["full+window"]
    shards = {fingerprint("w", full.shard(rank, 2), "n").layout for rank in range(2)}
    assert shards == {fingerprint("w", full, "n").layout}
    assert fingerprint("w", other, "n").layout not in shards


@pytest.mark.parametrize("field", OTHERS)
@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_workers_that_differ_refuse_each_other_with_both_sides_in_the_message(field: str, side: str) -> None:
    marks = (MINE, OTHERS[field]) if side == "decode" else (OTHERS[field], MINE)
    with ends(SPEC, "shm", marks=marks) as e:
        prompt = e.prompt(8)
        e.start(prompt)
        outcome = e.outcome(prompt.room)
        assert isinstance(outcome, HandoverFailed)
        assert outcome.kind is ErrorKind.ROOM
        assert f"{field}: " in outcome.message
        for name, mark in (("prefill-0", marks[0]), ("decode-0", marks[1])):
            assert name in outcome.message
            assert str(getattr(mark, field)) in outcome.message
        e.sender.fail(prompt.room, ErrorKind.CANCELLED, "decode is gone")
        e.quiet()


def test_decode_looks_too_when_prefill_lets_everybody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinpool.transfer.rooms.sender.sender_peers.refuse_mismatch", lambda *said: None)
    with ends(SPEC, "shm", marks=(MINE, OTHERS["weights"])) as e:
        prompt = e.prompt(8)
        e.start(prompt)
        outcome = e.outcome(prompt.room)
        assert isinstance(outcome, HandoverFailed)
        assert outcome.message.startswith("weights: decode-0 has another model, prefill-0 has a model")
        e.sender.fail(prompt.room, ErrorKind.CANCELLED, "decode is gone")
        e.quiet()


def test_pairs_of_other_classes_hand_over_under_fast() -> None:
    marks = tuple(replace(MINE, numerics=numerics_class("fast", by)) for by in ("avx2", "avx512"))
    with ends(SPEC, "shm", marks=(marks[0], marks[1])) as e:
        prompt = e.prompt(8)
        e.open(prompt)
        e.sender.write(prompt.room, prompt.all(), ())
        e.seal(prompt)
        outcome = e.outcome(prompt.room)
        assert isinstance(outcome, PromptArrived), outcome
        outcome.release()
        e.quiet()


def test_every_hello_carries_the_whole_fingerprint() -> None:
    mark = Fingerprint(41, "a layout", "fast:by hand", "weights")
    with ends(SPEC, "zmq", marks=(mark, mark)) as e:
        e.start(e.prompt(4))
        peer = next(iter(e.receiver_peers.values()))
        hello = m.decode(m.encode(e.receiver_peers.hello(peer.ref)))
        assert isinstance(hello, m.Hello)
        assert hello.fingerprint == mark
        e.until(lambda: peer.welcome is not None, "the welcome")
        assert peer.welcome is not None
        assert peer.welcome.fingerprint == mark
