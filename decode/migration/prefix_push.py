"""Pages that go from this worker's tree to another's, while everything here goes on.

Two things are given: the finished pages of a request that is about to move, so that little is left to send while its
stream stands still; and, by a worker that leaves, the prefixes that were used most, so that they needn't be computed
or sent again. Both are rooms like any other: the other worker borrows pages, this one writes what its tree has, and
what arrived is verified by its tags before the other's tree takes it. It costs no request anything if that fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from cache.allocation.allocation import Allocation
from cache.device.device_port import DONE
from cache.manager.kv_cache_manager import KVCacheManager
from cache.prefix_cache.token_prefix import TokenPrefix
from contracts.block_hash import KEY_BYTES
from contracts.clock import Clock
from contracts.config.cluster_config import Config
from contracts.errors import ErrorKind, WireError
from contracts.ids import RoomId
from contracts.interfaces.worker_interface import SessionId
from contracts.messages.router_commands import PushPrefix
from contracts.messages.worker_events import PushReady
from contracts.state_table import StateTable
from decode.request.request import DecodeRequest
from transfer.rooms.kv_sender import KVSender
from transfer.rooms.metadata_slots import HandoverMetadata
from transfer.rooms.room_outcomes import RoomGranted, RoomReleased
from worker.request_table import RequestTable
from worker.sendable_pages import finished


class PushState(StrEnum):
    OPEN = "open"
    WRITING = "writing"
    SENT = "sent"
    OVER = "over"


class PushEvent(StrEnum):
    GRANT = "grant"
    SENT = "sent"
    END = "end"


PUSH_TABLE = StateTable[PushState, PushEvent](
    "prefix push",
    {
        PushState.OPEN: {PushEvent.GRANT: PushState.WRITING, PushEvent.END: PushState.OVER},
        PushState.WRITING: {PushEvent.SENT: PushState.SENT, PushEvent.END: PushState.OVER},
        PushState.SENT: {PushEvent.END: PushState.OVER},
    },
)


@dataclass(eq=False)
class _Push:
    room: RoomId
    allocation: Allocation
    opened_at: float
    state: PushState = PushState.OPEN
    chain: list[bytes] = field(default_factory=list)


class PrefixPushes:
    """The giving end. Called between steps, by the worker's thread."""

    def __init__(
        self,
        manager: KVCacheManager,
        sender: KVSender,
        request_table: RequestTable[DecodeRequest],
        config: Config,
        clock: Clock,
        share: Callable[[DecodeRequest], None],
    ) -> None:
        """`share` gives the tree what a running request has finished."""
        self._manager, self._sender, self._request_table = manager, sender, request_table
        self._config, self._clock, self._share = config, clock, share
        self._pushes: dict[RoomId, _Push] = {}
        self._most = {
            p: max(1, config.decode.migration_chunk_bytes // manager.spec.whole.unit_bytes(p))
            for p in manager.spec.by_name
        }
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._pushes)

    @property
    def writing(self) -> bool:
        return any(push.state is PushState.WRITING for push in self._pushes.values())

    @property
    def next_deadline(self) -> float | None:
        silence = self._config.transfer.connect_timeout_s
        return min((g.opened_at + silence for g in self._pushes.values() if g.state is PushState.OPEN), default=None)

    def handle(self, session: SessionId, command: PushPrefix, request: DecodeRequest | None) -> None:
        """Keep what there is of the tokens, and say how much. `request`: whose they are, where none are given."""
        prefix = self._prefix(command, request)
        allocation = self._manager.hold_for_push(prefix, f"gift {command.room}") if prefix is not None else None
        positions = allocation.depth * self._manager.spec.page_tokens if allocation is not None else 0
        worth = allocation is not None and (
            bool(command.tokens) or self._bytes(allocation) > self._config.decode.migration_precopy_bytes
        )
        if allocation is not None and (not positions or not worth or not self._open(command, allocation)):
            self._manager.free(allocation)
            positions = 0
        self._request_table.emit(session, PushReady(command.request_id, command.attempt, positions))

    def _prefix(self, command: PushPrefix, request: DecodeRequest | None) -> TokenPrefix | None:
        page_tokens = self._manager.spec.page_tokens
        if command.tokens:
            return TokenPrefix.of(command.tokens, page_tokens, command.salt)
        if request is None or not request.in_place:
            return None
        self._share(request)
        return TokenPrefix.of(request.tokens[: request.committed], page_tokens, request.submit.salt)

    def _bytes(self, allocation: Allocation) -> int:
        return allocation.depth * self._manager.spec.whole.unit_bytes(self._manager.full)

    def _open(self, command: PushPrefix, allocation: Allocation) -> bool:
        try:
            self._sender.open(command.room, command.peer)
        except WireError:
            return False
        chain = allocation.prefix.chain
        keys = [chain[at : at + KEY_BYTES] for at in range(0, allocation.depth * KEY_BYTES, KEY_BYTES)]
        self._pushes[command.room] = _Push(command.room, allocation, self._clock.now(), chain=keys)
        return True

    def on_room(self, outcome: RoomGranted | RoomReleased) -> None:
        push = self._pushes.get(outcome.room)
        if push is None:
            return
        if isinstance(outcome, RoomGranted):
            push.state = PUSH_TABLE.next(push.state, PushEvent.GRANT)
        else:
            self._end(push)

    def round(self) -> None:
        """Write the next part of each gift, and give up those that nobody has fetched."""
        late = self._clock.now() - self._config.transfer.connect_timeout_s
        for push in list(self._pushes.values()):
            if push.allocation.invalid:
                self._sender.fail(push.room, ErrorKind.ROOM, "a page of it turned out damaged")
                self._end(push)
            elif push.state is PushState.WRITING:
                if self._manager.settled(push.allocation):  # Some of it may still be on its way from the host.
                    self._write(push)
            elif push.state is PushState.OPEN and push.opened_at <= late:
                self._sender.fail(push.room, ErrorKind.ROOM, "nobody fetched it")
                self._end(push)

    def _write(self, push: _Push) -> None:
        wanted = self._sender.wanted(push.room)
        part = finished(wanted, push.allocation, push.chain, {}, self._most)
        self._sender.write(push.room, part, (DONE,))
        self.bytes += sum(len(f.indices) * self._manager.spec.whole.unit_bytes(p) for p, f in part.items())
        if part and any(self._sender.wanted(push.room).values()):
            return
        try:
            self._sender.seal(push.room, HandoverMetadata(push.room, 0, 0, None, 0, 0))
        except WireError as error:
            # More is wanted than was said to be there.
            self._sender.fail(push.room, ErrorKind.ROOM, str(error))
            self._end(push)
            return
        push.state = PUSH_TABLE.next(push.state, PushEvent.SENT)

    def _end(self, push: _Push) -> None:
        push.state = PUSH_TABLE.next(push.state, PushEvent.END)
        del self._pushes[push.room]
        self._manager.free(push.allocation)

    def close(self) -> None:
        for push in list(self._pushes.values()):
            self._sender.fail(push.room, ErrorKind.ROOM, "the worker closes")
            self._end(push)
