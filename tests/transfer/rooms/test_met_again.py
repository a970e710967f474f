"""Peers that go and are met again: nothing of the time before is held against them, and nothing of it is kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.support.pool_sets import pool_sets
from tests.support.room_ends import Ends, Prompt, ends
from tests.transfer.rooms.test_peers import descriptors
from twinpool.contracts.ids import Incarnation, WorkerName
from twinpool.contracts.messages.router_commands import PeerRef
from twinpool.transfer.rooms import room_messages as m
from twinpool.transfer.rooms.receiver.receiver_peers import MessageRefused
from twinpool.transfer.rooms.room_states import ExpectedPrompt, HandoverFailed, PromptArrived

SPEC = pool_sets()["all"]


class Line:
    """A link or channel whose connection is up or down as a test says; the rest is its own."""

    def __init__(self, real: Any) -> None:
        self._real, self.up = real, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def received(both: Ends, prompt: Prompt) -> None:
    """Hand `prompt`, which is granted, over."""
    both.sender.write(prompt.room, prompt.all(), ())
    both.seal(prompt)
    arrived = both.outcome(prompt.room)
    assert isinstance(arrived, PromptArrived), arrived
    arrived.release()
    both.released(prompt.room)


def refused(both: Ends) -> None:
    """The writer refuses the reader, which hears of it."""
    (writer,) = both.receiver_peers.values()
    both.sender_peers.reply(b"decode-0:1", m.PeerRefused("not now"))

    def heard() -> bool:
        both.outcomes += both.receiver.poll()
        return writer.estranged

    for _ in range(3000):
        if heard():
            return
        both.waiter.wait(0.01)
    raise AssertionError("the refusal never came")


def outage(both: Ends, line: Line, look: Callable[[], object], seconds: float) -> None:
    """A connection is down for so long, as the worker sees it, and up again."""
    line.up = False
    look()
    both.clock.advance(seconds)
    look()
    line.up = True
    look()


def test_two_short_outages_of_a_writer_are_no_long_one() -> None:
    with ends(SPEC, "shm", transfer={"link_timeout_s": 5.0}) as both:
        prompt = both.prompt(24)
        both.open(prompt)
        (writer,) = both.receiver_peers.values()
        line: Any = Line(writer.channel)
        writer.channel = line
        for _ in range(3):
            outage(both, line, both.poll, 4.0)
        assert both.outcomes == []
        received(both, prompt)
        late = both.prompt(24)
        both.open(late)
        outage(both, line, both.poll, 5.0)
        assert isinstance(both.outcome(late.room), HandoverFailed)
        both.quiet()


def test_b3_two_short_outages_of_a_reader_are_no_long_one() -> None:
    with ends(SPEC, "shm", transfer={"peer_forget_s": 40.0}) as both:
        both.open(prompt := both.prompt(24))
        received(both, prompt)
        (reader,) = both.sender_peers.values()
        line: Any = Line(reader.link)
        reader.link = line

        def look() -> None:
            both.clock.advance(1.0)  # The sender looks once a second.
            both.poll()

        for _ in range(3):
            outage(both, line, look, 30.0)
        assert list(both.sender_peers.values()) == [reader]
        outage(both, line, look, 40.0)
        assert not both.sender_peers


def test_a_writer_that_had_refused_is_met_again_with_all_the_time_that_a_new_one_has() -> None:
    with ends(SPEC, "shm") as both:
        both.open(kept := both.prompt(12))
        before = descriptors()
        refused(both)
        both.clock.advance(both.receiver.end.config.connect_timeout_s + 1)
        both.open(prompt := both.prompt(24))
        received(both, prompt)
        assert isinstance(both.outcome(kept.room), HandoverFailed)
        both.quiet()
        assert len(descriptors()) <= len(before), "it is watched once"


def test_a_reader_that_describes_its_memory_anew_is_met_anew_and_one_that_says_the_same_again_is_not() -> None:
    """As a reader does that has ended the access which it had described before."""
    with ends(SPEC, "shm") as both:
        both.open(prompt := both.prompt(12))
        (writer,), (before,) = both.receiver_peers.values(), both.sender_peers.values()
        hello = both.receiver_peers.hello(both.writer)
        writer.channel.send(m.encode(hello))
        received(both, prompt)
        assert list(both.sender_peers.values()) == [before]
        (part,) = hello.descriptor["ranks"]
        writer.channel.send(m.encode(replace(hello, descriptor={"ranks": [part | {"access": 2}]})))
        both.until(lambda: list(both.sender_peers.values()) != [before], "the reader as it is now")
        both.open(after := both.prompt(12))
        received(both, after)


def test_d3_a_request_that_names_an_older_incarnation_late_ends_no_room_of_a_newer_one() -> None:
    with ends(SPEC, "zmq") as both:
        both.open(prompt := both.prompt(24))
        (writer,) = both.receiver_peers.values()
        assert writer.watch is not None
        writer.watch.close()
        writer.watch = None  # As on another host.
        older, late = PeerRef(writer.ref.name, Incarnation(0), "tcp://127.0.0.1:1"), both.prompt(12)
        both.receiver.open(late.room, older, ExpectedPrompt(late.keys, 12))
        received(both, prompt)
        both.receiver.abort(late.room, "enough")


def test_b3_of_a_writer_that_is_forgotten_nothing_is_kept() -> None:
    with ends(SPEC, "shm") as both:
        both.open(prompt := both.prompt(24))
        received(both, prompt)
        (writer,) = both.receiver_peers.values()
        kept = weakref.ref(writer)
        refused(both)
        del writer
        both.poll()
        gc.collect()
        assert not both.receiver_peers
        assert kept() is None, "its last words are for nobody"


def test_b3_of_a_reader_that_is_lost_nothing_is_kept() -> None:
    with ends(SPEC, "shm") as both:
        both.open(given_up := both.prompt(24))
        both.receiver.abort(given_up.room, "enough")
        both.released(given_up.room)
        both.quiet()
        (reader,) = both.sender_peers.values()
        kept = weakref.ref(reader)
        both.sender_rooms.lost(both.sender_peers.lose(reader, "it is gone"))
        del reader
        gc.collect()
        assert kept() is None


def test_a_message_that_one_writer_cannot_use_ends_no_room_of_another() -> None:
    with ends(SPEC, "shm") as both:
        both.open(prompt := both.prompt(24))
        elsewhere = PeerRef(WorkerName("prefill-1"), Incarnation(1), "tcp://127.0.0.1:1")
        other = both.prompt(12)
        both.receiver.open(other.room, elsewhere, ExpectedPrompt(other.keys, 12))
        stranger = both.receiver_peers[elsewhere.name, elsewhere.incarnation]
        both.receiver._hear(MessageRefused(stranger, prompt.room, "no message has the tag 99"))
        assert both.receiver.refused == 1
        received(both, prompt)
        both.receiver.abort(other.room, "enough")


def test_rooms_to_one_reader_share_what_its_link_carries_a_second() -> None:
    """Counted once for each room, a busy link would look as fast as many, and its writes be cut for that."""
    with ends(SPEC, "shm") as both:
        rooms = [both.prompt(12) for _ in range(3)]
        for prompt in rooms:
            both.open(prompt)
        (reader,) = both.sender_peers.values()
        reader.link.sent.nbytes, reader.link.sent.busy_s = 600, 2.0
        assert both.sender.bytes_per_s([prompt.room for prompt in rooms]) == 300.0
        assert both.sender.bytes_per_s([rooms[0].room]) == 300.0
        for prompt in rooms:
            both.receiver.abort(prompt.room, "enough")
        both.quiet()
