"""The writer's side of planes `zmq` and `staged`: pages go down data connections, slots and notices down a ZMQ
socket."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial

import msgpack
import torch
import zmq

from twinpool.cache.device.device_port import DONE, Completion
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.ids import RoomId
from twinpool.transfer.net.disconnects import DisconnectWatch
from twinpool.transfer.net.fault_injection import WriteFaults
from twinpool.transfer.planes.data_plane import PageWrite, RoomTarget, SentCounts, SlotWrite
from twinpool.transfer.planes.posted_write import PostedWrite
from twinpool.transfer.planes.tcp.bounce_buffers import Staging, StreamPart
from twinpool.transfer.planes.tcp.data_connection import DataConnection, DataDoor, OutgoingWrite
from twinpool.transfer.planes.tcp.page_stream import PoolStream, bytes_of

SLOT_FRAME, NOTICE_FRAME = b"S", b"N"


class ZmqLink:
    """The `WriteLink` of planes `zmq` and `staged`. A notice may overtake pages, so it says how many writes go before
    it. Writes may be posted on another thread than notices are sent on."""

    layered = True
    ranked = False

    def __init__(
        self,
        source: PoolSet,
        socket: zmq.Socket[bytes],
        watch: DisconnectWatch,
        faults: WriteFaults,
        ranks: tuple[int, int],
        streams: dict[str, PoolStream],
        door: DataDoor,
        *,
        frame_bytes: int,
        connections: int,
        wake: Callable[[], None],
        staging: Staging | None = None,
    ) -> None:
        """`ranks`: this writer's rank, and the number of ranks of its worker. `streams`: what is written to the
        reader's rank, by pool. `door`: where its data connections are taken. `frame_bytes`: the most bytes of a pool in
        one write. `connections`: how many to spread writes over. `wake` is called when a write has ended. `staging`:
        the bounce buffers that pages go through; None: they are sent from where they lie."""
        self.frame_bytes: int | None = frame_bytes
        self.sent = SentCounts()
        self._ranks, self._streams, self._door, self._wake = ranks, streams, door, wake
        self._source, self._staging = source, staging
        self._socket, self._watch, self._faults = socket, watch, faults
        self._connections: list[DataConnection | None] = [None] * connections
        self._cut = False
        self._one = threading.RLock()
        """Held to use the socket and the connections."""

    def admit(self, target: RoomTarget) -> None: ...  # The reader itself looks up what it has granted.

    def order_parts(self, write: PageWrite | SlotWrite, after: Sequence[Completion]) -> Completion:
        return DONE

    def post(self, write: PageWrite | SlotWrite) -> Completion:
        target = write.target
        if isinstance(write, SlotWrite):
            with self._one:
                self._socket.send_multipart([SLOT_FRAME, msgpack.packb((target.room, target.ticket)), write.data])
            return DONE
        parts, runs = list[StreamPart](), list[tuple[str | int, ...]]()
        for pool, run in write.runs.items():
            if (stream := self._streams.get(pool)) is not None:
                layers = () if write.layers is None else (write.layers[pool].start, write.layers[pool].stop)
                parts.append((stream.of_layers(range(*layers)) if layers else stream, run.indices))
                runs.append((pool, run.first, len(run), *layers))
        head = msgpack.packb((target.room, target.ticket, runs, *self._ranks, write.number))
        nbytes = sum(len(pages) * stream.page_bytes for stream, pages in parts)
        posted = PostedWrite(self._wake)
        body = partial(self._body, parts, nbytes) if self._staging is None else partial(self._bounced, parts)
        outgoing = OutgoingWrite(head, body, nbytes, posted)
        with self._one:
            try:
                while not self._connection().send(outgoing):
                    self._look()
            except OSError as error:  # Too many open files, say. Whoever posts knows failed writes by `RuntimeError`.
                raise RuntimeError(f"no connection for pages can be opened: {error}") from None
        return posted

    def _connection(self) -> DataConnection:
        """Return the connection with the fewest writes under way, opened if need be."""
        at = min(range(len(self._connections)), key=lambda n: len(self._connections[n] or ()))
        connection = self._connections[at]
        if connection is None:
            connection = self._connections[at] = DataConnection(self._door, self._faults.in_write, self.sent)
        return connection

    def _body(self, parts: Sequence[StreamPart], nbytes: int) -> Generator[Sequence[memoryview]]:
        """Yield the bytes of these pages in the order in which they travel, in two halves."""
        rows = self._rows(parts, nbytes)
        half = len(rows) // 2
        yield rows[:half]
        yield rows[half:]

    def _bounced(self, parts: Sequence[StreamPart]) -> Generator[Sequence[memoryview]]:
        """Yield the same bytes out of bounce buffers, the first load in two halves."""
        assert self._staging is not None
        with contextlib.closing(self._staging.gathered(parts)) as gathered:
            for number, (buffer, load) in enumerate(gathered):
                for piece in load.pieces:
                    if piece.first:
                        self._faults.after_seal(buffer.of(piece), 0)
                ready = buffer.bytes[: load.nbytes]
                half = 0 if number else len(ready) // 2
                if half:
                    yield [ready[:half]]
                yield [ready[half:]]

    def _rows(self, parts: Sequence[StreamPart], nbytes: int) -> Sequence[memoryview]:
        """Return the bytes of these pages in the order in which they travel; sealed ones in one piece."""
        region = bytes_of(self._source.region)
        out: list[memoryview] = []
        packed = torch.empty(nbytes if self._door.sealed else 0, dtype=torch.uint8)
        at = 0
        for stream, indices in parts:
            size = len(indices) * stream.page_bytes
            # What is damaged on purpose is a copy: the pages themselves stay right.
            rows = None if self._door.sealed or self._faults.corrupts else stream.rows(region, indices)
            if rows is not None:
                out += rows
                continue
            part = packed[at : at + size] if self._door.sealed else torch.empty(size, dtype=torch.uint8)
            stream.pack(self._source.region, indices, part)
            self._faults.after_seal(part, 0)
            at += size
            if not self._door.sealed:
                out.append(bytes_of(part))
        return [bytes_of(packed)] if self._door.sealed else out

    def notify(self, room: RoomId, data: bytes, writes: int = 0) -> None:
        with self._one:
            self._socket.send_multipart([NOTICE_FRAME, msgpack.packb((room, writes, self._ranks[1])), data])

    def cut(self) -> bool:
        with self._one:
            self._look()
            cut, self._cut = self._cut, False
        return self._watch.cut() or cut

    def _look(self) -> None:
        """Forget connections that were cut; the next write opens new ones."""
        for at, connection in enumerate(self._connections):
            if connection is not None and connection.failed:
                connection.close()
                self._connections[at], self._cut = None, True

    @property
    def up(self) -> bool:
        return self._watch.was_up

    def sever(self) -> None:
        with self._one:
            for at, connection in enumerate(self._connections):
                if connection is not None:
                    connection.close()
                    self._connections[at] = None

    def close(self) -> None:
        self.sever()
        self._watch.close()
        with self._one:
            self._socket.close(linger=0)
