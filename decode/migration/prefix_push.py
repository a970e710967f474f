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


GIFTS = StateTable[PushState, PushEvent](
    "gift",
    {
        PushState.OPEN: {PushEvent.GRANT: PushState.WRITING, PushEvent.END: PushState.OVER},
        PushState.WRITING: {PushEvent.SENT: PushState.SENT, PushEvent.END: PushState.OVER},
        PushState.SENT: {PushEvent.END: PushState.OVER},
    },
)


@dataclass(eq=False)
class _Push:
    room: RoomId
    claim: Allocation
    opened_at: float
    state: PushState = PushState.OPEN
    chain: list[bytes] = field(default_factory=list)


class PrefixPushes:
    """The giving end. Called between steps, by the worker's thread."""

    def __init__(
        self,
        seat: KVCacheManager,
        sender: KVSender,
        desk: RequestTable[DecodeRequest],
        config: Config,
        clock: Clock,
        share: Callable[[DecodeRequest], None],
    ) -> None:
        """`share` gives the tree what a running request has finished."""
        self._seat, self._sender, self._desk = seat, sender, desk
        self._config, self._clock, self._share = config, clock, share
        self._gifts: dict[RoomId, _Push] = {}
        self._most = {
            p: max(1, config.decode.move_chunk_bytes // seat.spec.whole.unit_bytes(p)) for p in seat.spec.by_name
        }
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._gifts)

    @property
    def writing(self) -> bool:
        return any(gift.state is PushState.WRITING for gift in self._gifts.values())

    @property
    def next_deadline(self) -> float | None:
        silence = self._config.transfer.connect_timeout_s
        return min((g.opened_at + silence for g in self._gifts.values() if g.state is PushState.OPEN), default=None)

    def handle(self, session: SessionId, command: PushPrefix, request: DecodeRequest | None) -> None:
        """Keep what there is of the tokens, and say how much. `request`: whose they are, where none are given."""
        prefix = self._prefix(command, request)
        claim = self._seat.lend(prefix, f"gift {command.room}") if prefix is not None else None
        positions = claim.depth * self._seat.spec.page_tokens if claim is not None else 0
        worth = claim is not None and (
            bool(command.tokens) or self._bytes(claim) > self._config.decode.move_ahead_bytes
        )
        if claim is not None and (not positions or not worth or not self._open(command, claim)):
            self._seat.release(claim)
            positions = 0
        self._desk.tell(session, PushReady(command.request_id, command.attempt, positions))

    def _prefix(self, command: PushPrefix, request: DecodeRequest | None) -> TokenPrefix | None:
        page_tokens = self._seat.spec.page_tokens
        if command.tokens:
            return TokenPrefix.of(command.tokens, page_tokens, command.salt)
        if request is None or not request.in_place:
            return None
        self._share(request)
        return TokenPrefix.of(request.tokens[: request.committed], page_tokens, request.submit.salt)

    def _bytes(self, claim: Allocation) -> int:
        return claim.depth * self._seat.spec.whole.unit_bytes(self._seat.full)

    def _open(self, command: PushPrefix, claim: Allocation) -> bool:
        try:
            self._sender.open(command.room, command.peer)
        except WireError:
            return False
        chain = claim.prefix.chain
        keys = [chain[at : at + KEY_BYTES] for at in range(0, claim.depth * KEY_BYTES, KEY_BYTES)]
        self._gifts[command.room] = _Push(command.room, claim, self._clock.now(), chain=keys)
        return True

    def hear(self, outcome: RoomGranted | RoomReleased) -> None:
        gift = self._gifts.get(outcome.room)
        if gift is None:
            return
        if isinstance(outcome, RoomGranted):
            gift.state = GIFTS.next(gift.state, PushEvent.GRANT)
        else:
            self._end(gift)

    def round(self) -> None:
        """Write the next part of each gift, and give up those that nobody has fetched."""
        late = self._clock.now() - self._config.transfer.connect_timeout_s
        for gift in list(self._gifts.values()):
            if gift.claim.betrayed:
                self._sender.fail(gift.room, ErrorKind.ROOM, "a page of it turned out damaged")
                self._end(gift)
            elif gift.state is PushState.WRITING:
                if self._seat.settled(gift.claim):  # Some of it may still be on its way from the host.
                    self._write(gift)
            elif gift.state is PushState.OPEN and gift.opened_at <= late:
                self._sender.fail(gift.room, ErrorKind.ROOM, "nobody fetched it")
                self._end(gift)

    def _write(self, gift: _Push) -> None:
        wanted = self._sender.wanted(gift.room)
        part = finished(wanted, gift.claim, gift.chain, {}, self._most)
        self._sender.write(gift.room, part, (DONE,))
        self.bytes += sum(len(f.indices) * self._seat.spec.whole.unit_bytes(p) for p, f in part.items())
        if part and any(self._sender.wanted(gift.room).values()):
            return
        try:
            self._sender.seal(gift.room, HandoverMetadata(gift.room, 0, 0, None, 0, 0))
        except WireError as error:
            # More is wanted than was said to be there.
            self._sender.fail(gift.room, ErrorKind.ROOM, str(error))
            self._end(gift)
            return
        gift.state = GIFTS.next(gift.state, PushEvent.SENT)

    def _end(self, gift: _Push) -> None:
        gift.state = GIFTS.next(gift.state, PushEvent.END)
        del self._gifts[gift.room]
        self._seat.release(gift.claim)

    def close(self) -> None:
        for gift in list(self._gifts.values()):
            self._sender.fail(gift.room, ErrorKind.ROOM, "the worker closes")
            self._end(gift)
