"""Prefix pushes and pulls: pages of one decode worker's tree go into another's, while everything there goes on.

Two things are pushed: the finished pages of a request that is about to migrate, so that little is left to send while
its stream stands still; and, by a worker that leaves, the prefixes that were used most, so that they needn't be
computed or sent again. Both go through rooms like any other: the other worker leases and grants pages, this one writes
what its tree has, and the other verifies by the tags what arrived before its tree takes it. A push that fails costs no
request anything.

A pull is the other end of a push:

open       a room is open, and pages of the full pool are leased and granted
over       all pages came and match their tags: the tree has them; or they didn't, and the leases are released
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from twinpool.cache.allocation import Allocation
from twinpool.cache.device.device_port import DONE
from twinpool.cache.memory.kv_cache_spec import due
from twinpool.cache.prefix_cache.tree_node import TokenPrefix
from twinpool.contracts.block_hash import KEY_BYTES, block_hashes
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.errors import ErrorKind, WireError
from twinpool.contracts.ids import RoomId
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.router_commands import PullPrefix, PushPrefix
from twinpool.contracts.messages.worker_events import PullDone, PushReady
from twinpool.contracts.state_table import StateTable
from twinpool.decode.request import DecodePages, DecodeRequest, RouterEvent
from twinpool.transfer.rooms.receiver.kv_receiver import KVReceiver
from twinpool.transfer.rooms.receiver.receiver_rooms import ReceiverOutcome
from twinpool.transfer.rooms.room_messages import HandoverMetadata
from twinpool.transfer.rooms.room_states import ExpectedPrompt, PromptArrived, RoomGranted, RoomReleased
from twinpool.transfer.rooms.sender.kv_sender import KVSender
from twinpool.worker.request_table import RequestTable, pages_within, sendable_pages


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
    """The prefix pushes of one worker, by room: the giving end. Called between steps, by the worker's thread."""

    def __init__(
        self,
        requests: RequestTable[DecodeRequest],
        pages: DecodePages,
        sender: KVSender,
        config: Config,
        clock: Clock,
    ) -> None:
        self._requests, self._pages, self._sender = requests, pages, sender
        self._manager, self._config, self._clock = pages.manager, config, clock
        self._most = pages_within(self._manager.spec, config.decode.migration_chunk_bytes)
        self._pushes: dict[RoomId, _Push] = {}
        self.counters = {"given_bytes": 0.0}

    def __len__(self) -> int:
        return len(self._pushes)

    @property
    def allocations(self) -> int:
        """Allocations of the KV cache manager that pushes hold."""
        return len(self._pushes)

    @property
    def writing(self) -> bool:
        """Whether a push has pages to write, so that the worker shouldn't sleep."""
        return any(push.state is PushState.WRITING for push in self._pushes.values())

    @property
    def next_deadline(self) -> float | None:
        """When the first push without a grant is given up, in seconds of the clock; None if there is none."""
        silence = self._config.transfer.connect_timeout_s
        return min((g.opened_at + silence for g in self._pushes.values() if g.state is PushState.OPEN), default=None)

    def begin(self, session: SessionId, command: PushPrefix) -> list[RouterEvent]:
        """Hold the pages that the tree has of the command's tokens, or of the request's where it names none.

        Returns `PushReady` with the positions that are held, 0 where there are none or a push isn't worth it.
        """
        prefix = self._prefix(session, command)
        allocation = (
            self._manager.allocations.hold_for_push(prefix, f"push {command.room}") if prefix is not None else None
        )
        positions = allocation.depth * self._manager.spec.page_tokens if allocation is not None else 0
        worth = allocation is not None and (
            bool(command.tokens) or self._bytes(allocation) > self._config.decode.migration_precopy_bytes
        )
        if allocation is not None and (not positions or not worth or not self._open(command, allocation)):
            self._manager.allocations.free(allocation)
            positions = 0
        return [RouterEvent(session, PushReady(command.request_id, command.attempt, positions))]

    def _prefix(self, session: SessionId, command: PushPrefix) -> TokenPrefix | None:
        page_tokens = self._manager.spec.page_tokens
        if command.tokens:
            return TokenPrefix.of(command.tokens, page_tokens, command.salt)
        request = self._requests.get(session, command.request_id, command.attempt)
        if request is None or not request.in_place:
            return None
        self._pages.cache(request)
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
        """Take in the grant or the end of a room; a room without a push is ignored."""
        push = self._pushes.get(outcome.room)
        if push is None:
            return
        if isinstance(outcome, RoomGranted):
            push.state = PUSH_TABLE.next(push.state, PushEvent.GRANT)
        else:
            self._end(push)

    def round(self) -> None:
        """Write the next part of each push, and give up pushes with damaged pages, or without a grant after
        `transfer.connect_timeout_s` seconds."""
        late = self._clock.now() - self._config.transfer.connect_timeout_s
        for push in list(self._pushes.values()):
            if push.allocation.invalid:
                self._sender.fail(push.room, ErrorKind.ROOM, "a page of it turned out damaged")
                self._end(push)
            elif push.state is PushState.WRITING:
                # Some of it may still be on its way from the host.
                if self._manager.allocations.ready(push.allocation):
                    self._write(push)
            elif push.state is PushState.OPEN and push.opened_at <= late:
                self._sender.fail(push.room, ErrorKind.ROOM, "nobody fetched it")
                self._end(push)

    def _write(self, push: _Push) -> None:
        wanted = self._sender.wanted(push.room)
        part = sendable_pages(wanted, push.allocation, push.chain, {}, self._most)
        self._sender.write(push.room, part, (DONE,))
        self.counters["given_bytes"] += sum(
            len(f.indices) * self._manager.spec.whole.unit_bytes(p) for p, f in part.items()
        )
        if part and any(self._sender.wanted(push.room).values()):
            return
        try:
            self._sender.seal(push.room, HandoverMetadata(push.room, 0, 0, None, 0, 0))
        except WireError as error:
            # The other worker wants more than was said to be there, or a write has failed.
            self._sender.fail(push.room, ErrorKind.ROOM, str(error))
            self._end(push)
            return
        push.state = PUSH_TABLE.next(push.state, PushEvent.SENT)

    def _end(self, push: _Push) -> None:
        push.state = PUSH_TABLE.next(push.state, PushEvent.END)
        del self._pushes[push.room]
        self._manager.allocations.free(push.allocation)

    def close(self) -> None:
        for push in list(self._pushes.values()):
            self._sender.fail(push.room, ErrorKind.ROOM, "the worker closes")
            self._end(push)


@dataclass(frozen=True, eq=False)
class _Pull:
    session: SessionId
    command: PullPrefix
    allocation: Allocation


class PrefixPulls:
    """The prefix pulls of one worker, by room: the fetching end. Called between steps, by the worker's thread."""

    def __init__(self, requests: RequestTable[DecodeRequest], pages: DecodePages, receiver: KVReceiver) -> None:
        self._requests, self._pages, self._receiver = requests, pages, receiver
        self._manager = pages.manager
        self._fetches: dict[RoomId, _Pull] = {}
        self.counters = {"fetched_bytes": 0.0}

    @property
    def allocations(self) -> int:
        """Allocations of the KV cache manager that pulls hold."""
        return len(self._fetches)

    def begin(self, session: SessionId, command: PullPrefix) -> list[RouterEvent]:
        """Open the room and grant pages for what the tree lacks; returns `PullDone` at once where nothing will come."""
        size = self._manager.spec.page_tokens
        positions = len(command.tokens) // size * size
        keys = block_hashes(command.tokens[:positions], size, command.salt)
        try:
            self._receiver.open(command.room, command.peer, ExpectedPrompt(tuple(keys), positions))
        except WireError:
            return [_done(session, command, 0)]
        if self._begin(session, command, keys, positions):
            return []
        # This end gives the room up, so that the other end hears of it at once.
        self._receiver.abort(command.room, "nothing of it is wanted here, or there is no room for it")
        return [_done(session, command, 0)]

    def _begin(self, session: SessionId, command: PullPrefix, keys: list[bytes], positions: int) -> bool:
        if not self._pages.reuse or self._requests.draining or not positions:
            return False
        prefix = TokenPrefix.of(command.tokens[:positions], self._manager.spec.page_tokens, command.salt, keys)
        borrowed = self._manager.allocations.reserve_for_pull(prefix, f"fetch {command.room}", spare=command.spare)
        if borrowed is None:
            return False
        allocation, lease = borrowed
        # Of other pools nothing is wanted, so they are granted as if all of them were held.
        held = {pool: set(numbers) for pool, numbers in due(self._manager.spec, positions).items()}
        held[self._manager.full] -= set(allocation.lacking[self._manager.full])
        if not self._receiver.grant(command.room, {self._manager.full: lease}, held):
            lease.release()
            self._manager.allocations.free(allocation)
            return False
        self._fetches[command.room] = _Pull(session, command, allocation)
        return True

    def on_room(self, outcome: ReceiverOutcome) -> list[RouterEvent]:
        """Take in the outcome of a room; leases that arrived in a room without a pull are released."""
        fetch = self._fetches.pop(outcome.room, None)
        nbytes = 0
        if fetch is None:
            if isinstance(outcome, PromptArrived):
                outcome.release()
            return []
        if isinstance(outcome, PromptArrived):
            full = self._manager.full
            self._manager.allocations.insert_pulled(
                fetch.allocation, outcome.leases[full], outcome.digests.get(full, {})
            )
            nbytes = outcome.bytes
            self.counters["fetched_bytes"] += nbytes
        else:
            # The room releases its leases by itself.
            self._manager.allocations.free(fetch.allocation)
        return [_done(fetch.session, fetch.command, nbytes)]

    def close(self) -> None:
        for fetch in self._fetches.values():
            self._receiver.abort(fetch.command.room, "the worker closes")
            self._manager.allocations.free(fetch.allocation)
        self._fetches.clear()


def _done(session: SessionId, command: PullPrefix, nbytes: int) -> RouterEvent:
    return RouterEvent(session, PullDone(command.request_id, command.attempt, nbytes))
