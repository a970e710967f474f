"""Messages that are wrong, for everybody whom a worker hears: in one place each, or in several, or no messages at all.

They come in the middle of a hand-over of somebody else's, which must not notice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import zmq
from hypothesis import strategies as st

from tests.support.pool_sets import entry, pool_sets
from tests.support.room_ends import Ends, Prompt, ends, image
from tests.support.worker_parts import inbox_of
from twinpool.cache.device.device_port import DONE
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RoomId
from twinpool.transfer.net.control_channel import ControlChannel
from twinpool.transfer.rooms import room_messages as m
from twinpool.transfer.rooms.receiver.receiver_peers import ReceiverPeer as Writer
from twinpool.transfer.rooms.room_states import PromptArrived
from twinpool.transfer.rooms.sender.sender_peers import SenderPeer as Reader

JUNK: tuple[Any, ...] = (
    None, True, 7, -1, 2**63, 1.5, float("nan"), "x", "x" * 3000, b"", b"\xff" * 40, [], [[[]]], {}, {"a": {"b": []}},
)  # fmt: skip
Path = tuple[Any, ...]


def raw(message: m.RoomMessage) -> list[Any]:
    """The message as it travels, before it is packed: its tag and its fields."""
    values: list[Any] = msgpack.unpackb(m.encode(message))
    return values


def paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Every place of a nested value, the whole of it left out."""
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for key, inner in items:
        yield (*path, key)
        yield from paths(inner, (*path, key))


def at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def replaced(value: Any, path: Path, junk: Any) -> Any:
    out = copy.deepcopy(value)
    at(out, path[:-1])[path[-1]] = junk
    return out


def wrong_types(value: Any) -> Iterator[tuple[Path, Any]]:
    """Each place with something of another type in it."""
    for path in paths(value):
        for junk in JUNK:
            if type(junk) is not type(at(value, path)) and junk != at(value, path):
                yield path, replaced(value, path, junk)


def too_short(value: list[Any]) -> Iterator[list[Any]]:
    """Without its last fields."""
    for length in range(len(value)):
        yield value[:length]


SPEC = pool_sets()["all"]
WORDS: dict[str, Callable[[RoomId, int], m.Notice]] = {
    "quiesced": m.WriterQuiesced,
    "failed": lambda room, ticket: m.RoomFailed(room, ticket, ErrorKind.WORKER, "why"),
    "finished": m.NothingToDecode,
    "wrote": lambda room, ticket: m.PagesWritten(room, ticket, (m.PageTags("full", 0, (b"k" * 16,), (1,)),)),
    "wrote slot": m.SlotWritten,
}


@dataclass(eq=False)
class Met:
    """Both ends in the middle of a hand-over, somebody else's page, and another decode worker that is welcome."""

    both: Ends
    prompt: Prompt
    stranger: ControlChannel
    granted: set[tuple[str, int]]
    others: set[tuple[str, int]]
    """Places of the reader that no room has."""
    before: dict[tuple[str, int], list[bytes]]

    @property
    def writer(self) -> Writer:
        (writer,) = self.both.receiver_peers.values()
        return writer

    @property
    def reader(self) -> Reader:
        return self.both.sender_peers[b"decode-0:1"]

    @property
    def ticket(self) -> int:
        return self.both.sender_rooms[self.prompt.room].ticket

    def untouched(self) -> None:
        """Nothing has become of the room, nor of anybody's pages."""
        assert self.both.outcomes == []
        assert self.both.sender.granted(self.prompt.room)
        after = image(self.both.target)
        assert {place for place in after if after[place] != self.before[place]} == set()

    def ends_well(self) -> None:
        """The room goes on to its end, and arrives as it was sealed."""
        both, prompt = self.both, self.prompt
        both.sender.write(prompt.room, prompt.all(), (DONE,))
        both.seal(prompt)
        arrived = both.outcome(prompt.room)
        assert isinstance(arrived, PromptArrived), arrived
        for pool, run in prompt.runs.items():
            theirs = arrived.leases[pool].indices[: len(run)]
            for ours, there in zip(run.indices, theirs, strict=True):
                assert entry(both.source, pool, ours) == entry(both.target, pool, there)
        assert all(entry(both.target, *place) == self.before[place] for place in self.others)
        arrived.release()
        both.until(lambda: prompt.room not in both.sender_rooms, "the confirmation")
        assert both.sender.check() == both.receiver.check() == []
        assert both.receiver.slots.leases == both.receiver.rooms


@contextmanager
def met(plane: str) -> Iterator[Met]:
    with ends(SPEC, plane) as both:
        prompt = both.prompt(11)
        leases = both.open(prompt)
        (writer,) = both.receiver_peers.values()
        stranger = both.receiver.end.transport.connect(both.sender.control, b"decode-9:1")
        try:
            stranger.send(m.encode(replace(both.receiver_peers.hello(writer.ref), worker="decode-9")))
            both.until(lambda: b"decode-9:1" in both.sender_peers, "the other one's hello")
            granted = {(pool, index) for pool, lease in leases.items() for index in lease.indices}
            before = image(both.target)
            yield Met(both, prompt, stranger, granted, set(before) - granted, before)
        finally:
            stranger.close()


def refused(side: Any, count: int, both: Ends, say: Callable[[int], None], messages: int) -> None:
    """Says `messages` messages, some at a time, and waits until `count` of them were refused."""
    start = side.refused
    for number in range(messages):
        say(number)
        if number % 50 == 49:
            both.poll()
    both.until(lambda: side.refused >= start + count, f"{count} refusals, {side.refused - start} so far")
    assert side.refused == start + count


def controls(t: Met) -> list[m.RoomMessage]:
    """What decode says to prefill, as the stranger would have to say it."""
    hello = t.both.receiver_peers.hello(t.writer.ref)
    grant = t.both.receiver_rooms[t.prompt.room].grant
    assert grant is not None
    abort = m.AbortRoom(t.prompt.room, "no longer wanted", False, grant.ticket)
    return [replace(hello, worker="decode-9"), grant, abort, m.HandoverReceived(t.prompt.room)]


def flood(plane: str, data: st.DataObject, count: int) -> None:
    with met(plane) as t:
        room, ticket = RoomId("somebody's"), 17
        good: list[list[Any]] = [raw(message) for message in controls(t)]
        good += [raw(word(room, ticket)) for word in WORDS.values()]
        good = [
            [*value[:1], room, *value[2:]] if isinstance(value[1], str) and value[0] != 1 else value for value in good
        ]
        places = [(n, path) for n, value in enumerate(good) for path in paths(value)]
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        socket.connect(t.both.receiver_plane.describe()["ranks"][0]["endpoint"])
        wrong = st.one_of(
            st.binary(max_size=60),
            st.tuples(st.sampled_from(places), st.sampled_from(JUNK)).map(
                lambda p: msgpack.packb(replaced(good[p[0][0]], p[0][1], p[1]))
            ),
        )
        ways: list[Callable[[bytes], object]] = [
            t.stranger.send,
            t.writer.channel.send,
            lambda said: inbox_of(t.both.sender).send(b"decode-0:1", said),
            lambda said: t.reader.link.notify(room, said),
            lambda said: t.reader.link.notify(room, m.summed(said)),
            lambda said: socket.send_multipart([said]),
            lambda said: socket.send_multipart([b"P", said, said]),
            lambda said: socket.send_multipart([b"S", said, said]),
            lambda said: socket.send_multipart([b"N", said, said]),
            lambda said: socket.send_multipart([b"N", said, m.summed(said)]),
        ]
        said = data.draw(st.lists(st.tuples(st.integers(0, len(ways) - 1), wrong), min_size=count, max_size=count))
        for number, (way, message) in enumerate(said):
            if t.prompt.room.encode() not in message:
                ways[way](message)
            if number % 40 == 39:
                t.both.poll()
        # What comes behind it all has come when this is refused.
        t.both.sender.refused = t.both.receiver.refused = 0
        for channel in (t.stranger, t.writer.channel):
            channel.send(b"\xc1")
        t.both.until(lambda: t.both.sender.refused >= 2, "the last of them")
        socket.close(linger=0)
        t.untouched()
        t.ends_well()
