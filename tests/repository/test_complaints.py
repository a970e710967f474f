"""What people complain of most in systems that hand KV state over, each as a test that shows it can't happen here.

Those that the hazards' tests show already are named in docs/guarantees.md, beside these.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import pytest

from tests.router.stage import Stage
from tests.support.hash_workers import recite
from tests.support.pool_sets import pool_sets
from tests.support.room_ends import PLANES, Ends, Prompt, ends, image
from tests.workers.test_any_state import PAGE, hash_pair
from twinpool.contracts.errors import ErrorKind, LayoutMismatch, WireError
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.router_commands import PeerRef
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.transfer.rooms import room_messages as m
from twinpool.transfer.rooms.room_states import ExpectedPrompt, HandoverFailed, PromptArrived

SPEC = pool_sets()["all"]


@pytest.fixture(params=PLANES)
def both(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with ends(SPEC, request.param) as made:
        yield made
        made.quiet()


def hand_over(both: Ends, prompt: Prompt) -> None:
    """Of a room that is granted already; all of it arrives, and what held it is let go."""
    both.sender.write(prompt.room, prompt.all(), ())
    both.seal(prompt)
    arrived = both.outcome(prompt.room)
    assert isinstance(arrived, PromptArrived), arrived
    arrived.release()
    for lease in prompt.leases.values():
        lease.release()


def opened(both: Ends, positions: int) -> Prompt:
    prompt = both.prompt(positions)
    both.open(prompt)
    return prompt


def ticket_of(both: Ends, prompt: Prompt) -> int:
    grant = both.sender_rooms[prompt.room].grant
    assert grant is not None
    return grant.ticket


def say_notice(both: Ends, prompt: Prompt, notice: m.Notice, writes: int = 0) -> None:
    """The writer of this room says `notice`, whatever is true."""
    peer = both.sender_rooms[prompt.room].peer
    assert peer is not None
    peer.link.notify(notice.room, m.encode_notice(notice), writes)


def test_a_reference_out_of_range_is_refused_and_no_page_changes(both: Ends) -> None:
    prompt, fine = both.prompt(21), opened(both, 21)
    writer = PeerRef(WorkerName("prefill-0"), Incarnation(1), both.sender.control)
    both.receiver.open(prompt.room, writer, ExpectedPrompt(prompt.keys, 21))
    both.sender.open(prompt.room, PeerRef(WorkerName("decode-0"), Incarnation(1), ""))
    before = image(both.target)
    (peer,) = both.receiver_peers.values()
    beyond = max(both.target.layout.counts.values()) + 5
    for slot, index in ((0, beyond), (10**6, 1), (0, 2**40)):
        places = tuple(m.GrantedPages(p, r.first, tuple(index + i for i in range(len(r))), (0,) * len(r))
                       for p, r in prompt.runs.items())  # fmt: skip
        peer.channel.send(m.encode(m.PageGrant(prompt.room, places, slot, 0, 5)))
    hand_over(both, fine)
    if both.sender.granted(prompt.room):  # Where the reader does the storing the numbers are its own to look at.
        assert both.receiver_plane.revocable
        both.sender.write(prompt.room, prompt.all(), ())
        both.until(lambda: both.receiver_plane.dropped, "the write that nobody wants")
    changed = {place for place, data in image(both.target).items() if data != before[place]}
    granted = {(pool, i) for pool, run in fine.runs.items() for i in range(both.target.layout.counts[pool])}
    assert changed <= granted
    both.receiver.abort(prompt.room, "the test is over")
    both.sender.fail(prompt.room, ErrorKind.CANCELLED, "the test is over")
    for lease in prompt.leases.values():
        lease.release()


def test_a_reference_that_was_consumed_brings_no_earlier_answer_back(both: Ends) -> None:
    """The words of a room that is over come again while slot and pages are another's: dropped, counted, no harm."""
    old, prompt = opened(both, 21), both.prompt(21)
    ticket = ticket_of(both, old)
    hand_over(both, old)
    both.until(lambda: not both.sender.rooms, "the confirmation")
    both.open(prompt)
    late, before = both.receiver.late, image(both.target)
    for notice in (
        m.SlotWritten(old.room, ticket),
        m.PagesWritten(old.room, ticket, ()),
        m.NothingToDecode(old.room, ticket),
    ):
        say_notice(both, prompt, notice)
    both.until(lambda: both.receiver.late == late + 3, "the late words")
    assert image(both.target) == before
    assert not [o for o in both.outcomes if o.room == prompt.room]
    writer = PeerRef(WorkerName("prefill-0"), Incarnation(1), both.sender.control)
    with pytest.raises(WireError, match="exists already"):
        both.receiver.open(old.room, writer, ExpectedPrompt(old.keys, 21))
    with pytest.raises(WireError, match="exists already"):
        both.sender.open(old.room, PeerRef(WorkerName("decode-0"), Incarnation(1), ""))
    hand_over(both, prompt)


def test_a_slot_that_still_holds_an_earlier_requests_first_token_is_not_believed(both: Ends) -> None:
    """The word that the slot is written comes without the write: what lies there is of the room before."""
    old = opened(both, 21)
    hand_over(both, old)
    prompt = opened(both, 21)
    both.sender.write(prompt.room, prompt.all(), ())
    both.sender_peers[b"decode-0:1"].writes.settle()
    slot_written = m.SlotWritten(prompt.room, ticket_of(both, prompt))
    say_notice(both, prompt, slot_written, both.sender_rooms[prompt.room].writes)
    broken = both.outcome(prompt.room)
    assert isinstance(broken, HandoverFailed)
    assert broken.kind is ErrorKind.DAMAGED
    assert f"holds room {old.room}" in broken.message
    assert both.receiver.damage["metadata"] == 1
    for lease in prompt.leases.values():
        lease.release()


def test_a_restarted_decode_workers_memory_is_not_written_to_by_its_old_addresses() -> None:
    """On shm an address is a process, a file and a random number that the memory begins with: the last tells."""
    with ends(SPEC, "shm") as first:
        described = first.receiver.end.plane.describe()
        descriptor = {**described, "ranks": [{**described["ranks"][0], "nonce": b"another life's.."}]}
        with pytest.raises(LayoutMismatch, match="isn't the one that described its memory"):
            first.sender.end.plane.connect(descriptor)


def test_a_write_for_a_room_of_a_restarted_worker_is_stored_nowhere() -> None:
    """On zmq an address is an endpoint, which a successor may have again: it stores for rooms that it opened."""
    with ends(SPEC, "zmq") as both:
        prompt = opened(both, 21)
        before = image(both.target)
        both.receiver_plane.revoke(prompt.room)  # A successor knows nothing of it.
        both.sender.write(prompt.room, prompt.all(), ())
        both.until(lambda: both.receiver_plane.dropped, "the write")
        assert image(both.target) == before
        both.receiver.abort(prompt.room, "the test is over")
        both.until(lambda: not both.sender.rooms, "the end")


@pytest.mark.slow
def test_cancels_at_every_moment_leave_room_for_a_request_that_takes_everything() -> None:
    """Requests are cancelled on one worker or on both, sooner and later. Then one comes that needs nearly all pages of
    either pool: with two pages leaked it would wait for ever."""
    spec, rng = pool_sets(PAGE)["full"], random.Random(8)
    pages = 20
    with hash_pair("full", dict.fromkeys(Role, pages), prefill={"chunk_tokens": 8}) as both:
        legs: tuple[tuple[Role, ...], ...] = ((Role.PREFILL,), (Role.DECODE,), (Role.PREFILL, Role.DECODE))
        for rounds, who in product((0, 1, 2, 3, 4, 6, 9, 14), legs):
            prompt = [rng.randrange(300) for _ in range(rng.randint(1, 30))]
            request = both.submit(prompt, SamplingParams(max_tokens=rng.randint(2, 20), temperature=0.0))
            for _ in range(rounds):
                both.step()
            both.cancel(request, who)
        both.settle()
        length = (pages - 2) * PAGE - 4
        prompt = [rng.randrange(300) for _ in range(length)]
        (answer,) = both.run(both.submit(prompt, SamplingParams(max_tokens=4, temperature=0.0)))
        assert answer.list == recite(spec, prompt, 4)


@pytest.mark.parametrize("kind", [ErrorKind.CANCELLED, ErrorKind.WORKER, ErrorKind.ROOM, ErrorKind.DAMAGED])
@pytest.mark.parametrize("said", [0, 1])
def test_an_aborted_prefill_answers_nothing_or_the_right_thing(kind: ErrorKind, said: int) -> None:
    """The prefill leg fails, before its first token or after it: the client gets the whole answer, or an error and only
    tokens of the answer."""
    stage = Stage()
    rid = stage.submit(max_tokens=6)
    if said:
        stage.say(rid, Role.PREFILL, said)
    stage.error(rid, Role.PREFILL, kind)
    stage.finish()
    want = stage.answer(rid)
    assert stage.out[rid] == want[: len(stage.out[rid])]
    if stage.ends[rid].error is None:
        assert stage.out[rid] == want
    else:
        assert stage.ends[rid].message
    assert stage.core.check() == []


def test_tokens_of_an_attempt_that_was_given_up_reach_nobody() -> None:
    stage = Stage()
    rid = stage.submit(max_tokens=6)
    stage.say(rid, Role.PREFILL, 1)
    name = stage.leg(rid, Role.DECODE)
    stale = list(stage.legs[name, rid].events)
    stage.error(rid, Role.PREFILL, ErrorKind.WORKER)
    late = stage.core.counts.late_events
    for event in stale:
        stage.core.on_event(stage.key(name), event)
        stage.play()
    assert stage.core.counts.late_events == late + len(stale)
    stage.finish()
    stage.assert_answered(rid)
