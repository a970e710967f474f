"""Rooms of which one word was lost, came late or was said twice: both ends come to one end, and each is told once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.pool_sets import pool_sets
from tests.support.room_ends import Ends, Prompt, ends
from tests.transfer.rooms.test_one_sided_faults import befalling, write
from twinpool.contracts.errors import ErrorKind, WireError
from twinpool.contracts.ids import Incarnation, WorkerName
from twinpool.contracts.messages.router_commands import PeerRef
from twinpool.sim.fabric.plane_faults import StoreFault
from twinpool.transfer.rooms import room_messages as m
from twinpool.transfer.rooms.receiver.receiver_peers import PeerUnreachable
from twinpool.transfer.rooms.room_messages import HandoverMetadata
from twinpool.transfer.rooms.room_states import ExpectedPrompt, HandoverFailed, PromptArrived
from twinpool.transfer.rooms.sender.sender_peers import SenderPeer

SPEC = pool_sets()["all"]


@contextmanager
def said_to_the_writer(both: Ends) -> Iterator[list[object]]:
    """What the reader sends from here on."""
    said, send = list[object](), both.receiver_peers.send

    def noting(peer: object, message: object) -> object:
        said.append(message)
        return send(peer, message)  # type: ignore[arg-type]

    both.receiver_peers.send = noting  # type: ignore[method-assign, assignment]
    yield said
    both.receiver_peers.send = send  # type: ignore[method-assign]


def writer_of(both: Ends) -> SenderPeer:
    (peer,) = both.sender_peers.values()
    return peer


def in_quarantine(both: Ends) -> Prompt:
    """A room that its reader has given up, and whose writer hasn't heard of that."""
    prompt = both.prompt(24)
    both.open(prompt)
    both.receiver.abort(prompt.room, "the client has gone")
    assert both.receiver_rooms[prompt.room].aborting
    return prompt


def test_a_writer_that_does_not_answer_is_asked_again_after_a_while_and_not_at_every_look() -> None:
    with ends(SPEC, "shm") as both, said_to_the_writer(both) as said:
        prompt = in_quarantine(both)
        asked = [message for message in said if isinstance(message, m.AbortRoom)]
        for again in range(3):
            for _ in range(5):
                both.receiver.poll()
            assert len([x for x in said if isinstance(x, m.AbortRoom)]) == len(asked) + again
            both.clock.advance(both.receiver.end.config.link_timeout_s)
            both.receiver.poll()
        both.released(prompt.room)
        both.quiet()
        assert both.outcomes == [], "it was given up without an outcome, and gets none"


def test_the_receiver_is_due_when_the_first_writer_that_did_not_answer_is_asked_again() -> None:
    """A worker that has nothing else to do sleeps until then; granted rooms beside it have another time."""
    with ends(SPEC, "shm", transfer={"link_timeout_s": 3.0, "room_timeout_s": 40.0}) as both:
        granted, *given_up = prompts = [both.prompt(24) for _ in range(3)]
        for prompt in prompts:
            both.open(prompt)
        for prompt in given_up:  # The writer isn't polled from here on, and answers nothing.
            both.clock.advance(2.0)
            both.receiver.abort(prompt.room, "the client has gone")
        assert both.receiver.next_deadline == 2.0 + 3.0
        both.clock.advance(1.0)
        both.receiver.poll()
        assert both.receiver.next_deadline == 4.0 + 3.0, "the other one; the first was asked again just now"
        for prompt in given_up:
            both.released(prompt.room)
        both.until(lambda: both.receiver.rooms == 1, "the writer's word to both")
        assert both.receiver.next_deadline == 40.0
        both.receiver.abort(granted.room, "over")
        both.quiet()
        assert both.receiver.next_deadline is None


def test_after_a_cut_each_room_says_its_own_last_message_again_and_the_writer_takes_it_as_said_once() -> None:
    with ends(SPEC, "shm") as both:
        granted, over = both.prompt(24), both.prompt(12)
        both.open(over)
        both.sender.write(over.room, over.all(), ())
        both.seal(over)
        both.outcome(over.room).release()  # type: ignore[union-attr]
        both.start(granted)
        given_up = in_quarantine(both)
        (peer,) = both.receiver_peers.values()
        with said_to_the_writer(both) as said:
            both.receiver_rooms.resend(peer)
        assert {message.room: type(message) for message in said} == {  # type: ignore[attr-defined]
            granted.room: m.PageGrant,
            given_up.room: m.AbortRoom,
            over.room: m.HandoverReceived,
        }
        both.until(lambda: both.sender.granted(granted.room), "the grant")
        both.sender.write(granted.room, granted.all(), ())
        both.seal(granted)
        both.outcome(granted.room).release()  # type: ignore[union-attr]
        both.quiet()
        assert len(both.outcomes) == 2


def test_a_room_of_which_only_the_metadata_was_sent_fails_when_its_connection_is_cut() -> None:
    """Decode had all pages: the slot and its notice may be lost all the same, and nobody would say them again."""
    with ends(SPEC, "zmq") as both:
        prompt, begun = both.prompt(24), both.prompt(24)
        both.open(prompt, {pool: set(run.numbers) for pool, run in prompt.runs.items()})
        both.open(begun)
        both.seal(prompt)
        both.sender_rooms.disconnected(writer_of(both))
        released = both.released(prompt.room)
        assert not released.received
        assert "was cut" in released.reason
        assert both.sender.granted(begun.room), "a room that has not begun goes on"
        both.receiver.abort(begun.room, "enough")
        both.quiet()


@pytest.mark.parametrize("long", [False, True])
def test_a_peer_that_cannot_be_reached_is_kept_as_long_as_it_may_write_somewhere(long: bool) -> None:
    """Its rooms are all given up, and none has its word: who forgot it would never hear that."""
    with ends(SPEC, "shm") as both:
        prompt = in_quarantine(both)
        leases = both.receiver_rooms[prompt.room].leases
        (peer,) = both.receiver_peers.values()
        both.receiver_rooms.unreachable(PeerUnreachable(peer, "no connection", long))
        assert list(both.receiver_peers.values()) == [peer]
        assert all(lease.live for lease in leases.values())
        both.released(prompt.room)
        both.quiet()
        both.receiver_rooms.unreachable(PeerUnreachable(peer, "no connection", long))
        assert (list(both.receiver_peers.values()) == []) is long


def test_a_room_whose_write_failed_ends_by_its_writers_word_and_others_of_the_peer_by_the_access_that_ended() -> None:
    with befalling(StoreFault.FAILED) as both:
        failed, other = both.prompt(27), both.prompt(27)
        both.open(failed)
        both.open(other)
        write(both, failed)
        first = both.outcome(failed.room)
        assert isinstance(first, HandoverFailed)
        assert first.message == "the connection to decode-0 was cut", "it ends by its writer's word"
        second = both.outcome(other.room)
        assert isinstance(second, HandoverFailed)
        assert second.message in ("a write of prefill-0 failed", "the connection to decode-0 was cut")
        assert first.kind is second.kind is ErrorKind.ROOM
        assert len(both.outcomes) == 2


@pytest.mark.parametrize("plane", ["shm", "zmq"])
def test_rooms_that_end_in_another_order_than_they_began_have_each_their_own_metadata_and_are_used_once(
    plane: str,
) -> None:
    with ends(SPEC, plane) as both:
        prompts = [both.prompt(12 + 4 * n) for n in range(3)]
        for prompt in prompts:
            both.open(prompt)
        for number in (2, 0, 1):
            prompt = prompts[number]
            with pytest.raises(WireError, match="can't be sealed"):
                both.seal(prompt)
            both.sender.write(prompt.room, prompt.all(), ())
            both.sender.seal(prompt.room, HandoverMetadata(prompt.room, 0, 70 + number, None, number, prompt.positions))
            arrived = both.outcome(prompt.room)
            assert isinstance(arrived, PromptArrived), arrived
            assert (arrived.metadata.token, arrived.metadata.cached_tokens) == (70 + number, number)
            arrived.release()
            assert both.released(prompt.room).received
            expected = ExpectedPrompt(prompt.keys, prompt.positions)
            with pytest.raises(WireError, match="exists already"):
                both.receiver.open(prompt.room, both.writer, expected)
            with pytest.raises(WireError, match="exists already"):
                both.sender.open(prompt.room, PeerRef(WorkerName("decode-0"), Incarnation(1), ""))
        both.quiet()
