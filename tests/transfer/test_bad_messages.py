"""What peers and strangers may say: no worker ends by it, and nobody's pages change or come back by it."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.support.message_fuzz import SPEC, WORDS, Met, controls, flood, met, raw, refused, too_short, wrong_types
from tests.support.pool_sets import entry
from tests.support.room_ends import ends
from tests.support.worker_parts import inbox_of, slots_of
from twinpool.cache.device.device_port import DONE
from twinpool.contracts.errors import ErrorKind, WireError
from twinpool.contracts.ids import RoomId
from twinpool.contracts.messages.rank_order_codec import decode as decode_order
from twinpool.transfer.rooms import room_messages as m
from twinpool.transfer.rooms.room_states import HandoverFailed, PromptArrived

PLANES = ["shm", "zmq", "staged"]


@pytest.mark.slow
@pytest.mark.parametrize("welcome", [True, False], ids=["a welcome peer", "a stranger"])
@pytest.mark.parametrize("plane", PLANES)
def test_every_field_of_every_control_message_to_prefill_may_be_wrong(plane: str, welcome: bool) -> None:
    """A refusal each: no worker ends, and the rooms of others go on."""
    with met(plane) as t:
        bad = [data for message in controls(t) for _, data in wrong_types(raw(message))]
        bad += [data for message in controls(t) for data in too_short(raw(message))]
        channel = t.stranger
        if not welcome:
            channel = t.both.receiver.end.transport.connect(t.both.sender.control, b"nobody:1")
        refused(t.both.sender, len(bad), t.both, lambda n: channel.send(msgpack.packb(bad[n])), len(bad))
        if not welcome:
            channel.close()
        t.untouched()
        assert set(t.both.sender_peers) == {b"decode-0:1", b"decode-9:1"}
        t.ends_well()


@pytest.mark.slow
@pytest.mark.parametrize("plane", PLANES)
def test_every_field_of_every_control_message_to_decode_may_be_wrong(plane: str) -> None:
    with met(plane) as t:
        room, mark = t.prompt.room, t.both.sender.end.fingerprint
        welcome = m.Welcome("prefill-0", 1, mark, *t.both.sender.end.transport.mine(), (m.RankProcess(1, 2, "boot"),))
        said: list[m.RoomMessage] = [welcome, m.PeerRefused("no"), m.MessageRejected("no", room)]
        said += [WORDS["quiesced"](room, t.ticket), WORDS["failed"](room, t.ticket)]
        bad = [data for message in said for _, data in wrong_types(raw(message))]
        bad += [data for message in said for data in too_short(raw(message))]
        inbox = inbox_of(t.both.sender)
        refused(t.both.receiver, len(bad), t.both, lambda n: inbox.send(b"decode-0:1", msgpack.packb(bad[n])), len(bad))
        t.untouched()
        t.ends_well()


@pytest.mark.slow
@pytest.mark.parametrize("plane", ["local", *PLANES])
def test_every_field_of_every_notice_may_be_wrong(plane: str) -> None:
    with met(plane) as t:
        said = [word(t.prompt.room, t.ticket) for word in WORDS.values()]
        bad = [data for message in said for _, data in wrong_types(raw(message))]
        bad += [data for message in said for data in too_short(raw(message))]
        link = t.reader.link
        refused(
            t.both.receiver,
            len(bad),
            t.both,
            lambda n: link.notify(t.prompt.room, m.summed(msgpack.packb(bad[n]))),
            len(bad),
        )
        t.untouched()
        t.ends_well()


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("plane", PLANES)
def test_a5_places_come_back_only_by_the_word_of_who_was_granted_them(plane: str, word: str) -> None:
    """The same words with another ticket: of an earlier grant, of somebody who never saw it, or from before it."""
    with met(plane) as t:
        for ticket in (t.ticket + 1, 1, -t.ticket):
            t.reader.link.notify(t.prompt.room, m.encode_notice(WORDS[word](t.prompt.room, ticket)))
            t.both.until(lambda: t.both.receiver.refused, "a refusal")
            t.both.receiver.refused = 0
        t.untouched()
        t.ends_well()


@pytest.mark.parametrize("plane", PLANES)
def test_abort_and_received_of_anothers_room_are_rejected(plane: str) -> None:
    with met(plane) as t:
        for message in (m.AbortRoom(t.prompt.room, "not mine", True, t.ticket), m.HandoverReceived(t.prompt.room)):
            refused(t.both.sender, 1, t.both, lambda n, said=message: t.stranger.send(m.encode(said)), 1)  # type: ignore[misc]
            answer = None
            while answer is None or isinstance(answer, m.Welcome):
                t.both.poll()
                data = t.stranger.receive()
                answer = m.decode(data) if data is not None else None
            assert isinstance(answer, m.MessageRejected)
            assert answer.room == t.prompt.room
            assert "is not decode-9's" in answer.reason
        t.untouched()
        t.both.sender.write(t.prompt.room, t.prompt.all(), (DONE,))
        t.both.seal(t.prompt)
        # Sent, and still nobody else's to confirm: the pages stay where they are until decode has them.
        refused(t.both.sender, 1, t.both, lambda n: t.stranger.send(m.encode(m.HandoverReceived(t.prompt.room))), 1)
        arrived = t.both.outcome(t.prompt.room)
        assert isinstance(arrived, PromptArrived)
        assert t.both.released(t.prompt.room).received
        arrived.release()


@pytest.mark.parametrize("plane", PLANES)
def test_a_stranger_who_gives_a_room_up_before_it_opens_takes_it_from_nobody(plane: str) -> None:
    with met(plane) as t:
        prompt = t.both.prompt(7)
        t.stranger.send(m.encode(m.AbortRoom(prompt.room, "not mine", False, 1)))
        t.both.until(lambda: prompt.room in t.both.sender_peers[b"decode-9:1"].early.given_up, "the abort")
        t.both.open(prompt)
        assert t.both.sender.granted(prompt.room)
        t.ends_well()


def wrong_grants(t: Met) -> dict[str, m.PageGrant]:
    """Of a room of the stranger's own."""
    grant = t.both.receiver_rooms[t.prompt.room].grant
    assert grant is not None
    mine = replace(grant, room=RoomId("mine"))
    count = t.both.target.layout.counts["full"]

    def full(*indices: int) -> m.PageGrant:
        return replace(mine, places=(m.GrantedPages("full", 0, indices, (0,) * len(indices)),))

    return {
        "a page beyond the pool": full(3, count),
        "a page far beyond it": full(2**62),
        "the null page": full(0, 3),
        "a page before the first": full(-1),
        "one page twice": full(3, 3),
        "no such pool": replace(mine, places=(m.GrantedPages("latents", 0, (3,), (0,)),)),
        "too few epochs": replace(mine, places=(m.GrantedPages("full", 0, (3, 4), (0,)),)),
        "a position that can't be": replace(mine, places=(m.GrantedPages("full", 2**62, (3,), (0,)),)),
        "a slot beyond the last": replace(full(3), slot=10_000),
        "a slot before the first": replace(full(3), slot=-1),
        "no ticket": replace(full(3), ticket=0),
    }


@pytest.mark.parametrize("wrong", [
    "a page beyond the pool", "a page far beyond it", "the null page", "a page before the first", "one page twice",
    "no such pool", "too few epochs", "a position that can't be", "a slot beyond the last", "a slot before the first",
    "no ticket",
])  # fmt: skip
@pytest.mark.parametrize("early", [True, False], ids=["early", "in time"])
def test_a_kv_reference_out_of_range_is_refused_before_anything_is_written(wrong: str, early: bool) -> None:
    """The complaint: a block table entry from another process names memory that isn't there, and the writer faults or
    writes somewhere. Shared memory, where the writer itself would store there."""
    with met("shm") as t:
        grant = wrong_grants(t)[wrong]
        wants = structs.replace(t.writer.ref, name=t.both.sender_peers[b"decode-9:1"].name)
        if not early:
            t.both.sender.open(grant.room, wants)
        refused(t.both.sender, 1, t.both, lambda n: t.stranger.send(m.encode(grant)), 1)
        if early:
            assert not t.both.sender_peers[b"decode-9:1"].early.grants
        else:
            assert not t.both.released(grant.room).received
        assert not t.both.sender.granted(grant.room)
        t.untouched()
        t.ends_well()


def test_places_of_a_room_are_promised_to_no_other_room_of_the_same_reader() -> None:
    with met("shm") as t:
        grant = t.both.receiver_rooms[t.prompt.room].grant
        assert grant is not None
        other = replace(grant, room=RoomId("another"), ticket=5)
        refused(t.both.sender, 1, t.both, lambda n: t.writer.channel.send(m.encode(other)), 1)
        t.untouched()
        t.ends_well()
        # When the first is over they may be granted again.
        prompt = t.both.prompt(11)
        t.both.open(prompt)
        t.both.receiver.abort(prompt.room, "enough")
        t.both.until(lambda: not t.both.receiver.rooms, "its end")
        assert not any(t.reader.promised.places.values())


# ------------------------------------------------------------ what Refused and Rejected mean


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("data", [b"\x91\x63", b"\xc1", b"", msgpack.packb([4, "room-1"])], ids=repr)
def test_a_message_that_cannot_be_read_ends_nothing(plane: str, data: bytes) -> None:
    """A newer decode's message, or a damaged frame, from a peer that is welcome and in the middle of a hand-over."""
    with met(plane) as t:
        refused(t.both.sender, 1, t.both, lambda n: t.writer.channel.send(data), 1)
        about = t.prompt.room if m.room_of(data) else None
        if about is None:
            t.both.poll()
            t.untouched()
            t.ends_well()
            return
        # Prefill could tell of which room it was: that one can't go on, and ends with the writer's word.
        broken = t.both.outcome(about)
        assert isinstance(broken, HandoverFailed)
        t.both.until(lambda: not t.both.receiver.rooms, "the writer's word")


@pytest.mark.parametrize("plane", ["local", "shm"])
def test_a5_a_refusal_is_no_proof_that_nobody_writes(plane: str) -> None:
    """Decode hears `PeerRefused` from a writer that has its room: the pages stay out of use until the writer says
    that it writes no more. Taking it for death gave them to somebody else, over whose state the writer then wrote."""
    with ends(SPEC, plane) as both:
        prompt = both.prompt(24)
        leases = both.open(prompt)
        inbox_of(both.sender).send(b"decode-0:1", m.encode(m.PeerRefused("say hello first")))
        while not both.outcomes:  # The writer, for once, is slow to hear what decode says to that.
            both.outcomes += both.receiver.poll()
            both.waiter.wait(0.01)
        broken = both.outcome(prompt.room)
        assert isinstance(broken, HandoverFailed)
        assert "refused" in broken.message
        assert all(lease.live for lease in leases.values()), "promised, and not free"
        taken = {p: a.lease(a.free, "another request") for p, a in both.target.allocators.items()}
        before = {(p, i): entry(both.target, p, i) for p, lease in taken.items() for i in lease.indices}
        assert not {(p, i) for p, lease in leases.items() for i in lease.indices} & set(before)
        both.sender.write(prompt.room, prompt.all(), ())
        assert {place: entry(both.target, *place) for place in before} == before
        both.until(lambda: not both.receiver.rooms, "the writer's answer to the abort")
        for lease in taken.values():
            lease.release()
        both.until(lambda: not both.sender.rooms, "the end of the room")
        both.quiet()


@pytest.mark.parametrize("plane", PLANES)
def test_a_decode_worker_that_was_forgotten_says_hello_again(plane: str) -> None:
    with ends(SPEC, plane) as both:
        first, second = both.prompt(11), both.prompt(11)
        both.open(first)
        both.sender_rooms.lost(both.sender_peers.lose(both.sender_peers[b"decode-0:1"], "forgotten"))
        both.receiver.abort(first.room, "cancelled")
        both.until(lambda: not both.receiver.rooms, "the answer of a writer that knows it no more")
        both.start(second)
        broken = both.outcome(second.room)
        assert isinstance(broken, HandoverFailed)
        both.sender.fail(second.room, ErrorKind.CANCELLED, "tried again")
        third = both.prompt(11)
        both.open(third)
        both.sender.write(third.room, third.all(), (DONE,))
        both.seal(third)
        arrived = both.outcome(third.room)
        assert isinstance(arrived, PromptArrived)
        arrived.release()
        both.quiet()


@pytest.mark.parametrize("plane", PLANES)
def test_an_abort_of_a_stranger_is_answered_and_takes_nothing_from_anybody(plane: str) -> None:
    with met(plane) as t:
        nobody = t.both.receiver.end.transport.connect(t.both.sender.control, b"nobody:1")
        nobody.send(m.encode(m.AbortRoom(RoomId("never heard of"), "what", False, 9)))
        answers: list[m.RoomMessage] = []

        def heard() -> bool:
            data = nobody.receive()
            answers.extend([m.decode(data)] if data is not None else [])
            return bool(answers)

        t.both.until(heard, "an answer")
        assert answers == [m.WriterQuiesced(RoomId("never heard of"), 9)]
        refused(t.both.sender, 1, t.both, lambda n: nobody.send(m.encode(m.AbortRoom(t.prompt.room, "", False, 9))), 1)
        nobody.close()
        t.untouched()
        t.ends_well()


# ------------------------------------------------------------ frames


def _frames(t: Met) -> list[Any]:
    """A write of one page as it should be, but for the head's fields."""
    return [t.prompt.room, t.ticket, [["full", 0, 1]], 0, 1, 1]


@pytest.mark.slow
def test_every_field_of_every_frame_may_be_wrong() -> None:
    """Frames of pages and of slots from a stranger: stored nowhere, whatever is wrong with them."""
    with met("zmq") as t:
        page = b"\7" * SPEC.unit_bytes("full")
        bad = [(b"P", head, page) for _, head in wrong_types(_frames(t))]
        bad += [(b"P", head, page) for head in too_short(_frames(t))]
        bad += [(b"S", head, page[:99]) for _, head in wrong_types([t.prompt.room, t.ticket])]
        bad += [(b"P", [t.prompt.room, t.ticket + 1, [["full", 0, 1]], 0, 1, 1], page)]
        bad += [(b"P", [t.prompt.room, t.ticket, [["full", 0, 1], ["full", 0, 1]], 0, 1, 1], page)]
        bad += [(b"S", [t.prompt.room, t.ticket + 1], page[:99]), (b"X", [], page)]
        plane = t.both.receiver_plane
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        socket.connect(plane.describe()["ranks"][0]["endpoint"])
        for kind, head, data in bad:
            socket.send_multipart([kind, msgpack.packb(head), data])
        t.both.until(lambda: plane.dropped >= len(bad), f"{len(bad)} dropped")
        assert plane.dropped == len(bad)
        socket.close(linger=0)
        slots = slots_of(t.both.receiver)
        assert not slots.any(), "nobody has written metadata"
        t.untouched()
        t.ends_well()


@pytest.mark.slow
@pytest.mark.parametrize("plane", PLANES)
@given(data=st.data())
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_floods_of_damaged_messages_end_nothing(plane: str, data: st.DataObject) -> None:
    """Several places wrong at once, and raw bytes, on every way into a worker."""
    flood(plane, data, 120)


@given(st.binary(max_size=120))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_d9_random_bytes_are_no_order_to_a_rank(data: bytes) -> None:
    with contextlib.suppress(WireError):
        decode_order(data)
