"""Prefix pulls: pages of another decode worker's tree come into this one's (`decode.migration.prefix_push` sends them).

open       a room is open, and pages of the full pool are leased and granted
over       all pages came and match their tags: the tree has them; or they didn't, and the leases are released
"""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.cache.allocation.allocation import Allocation
from twinpool.cache.memory.required_pages import due
from twinpool.cache.prefix_cache.nodes.token_prefix import TokenPrefix
from twinpool.contracts.block_hash import block_hashes
from twinpool.contracts.errors import WireError
from twinpool.contracts.ids import RoomId
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.router_commands import PullPrefix
from twinpool.contracts.messages.worker_events import PullDone
from twinpool.decode.request.request import DecodeRequest
from twinpool.decode.request.request_outcomes import RouterEvent
from twinpool.decode.request.request_pages import DecodePages
from twinpool.transfer.rooms.receiver.kv_receiver import KVReceiver
from twinpool.transfer.rooms.receiver.receiver_rooms import ReceiverOutcome
from twinpool.transfer.rooms.room_outcomes import ExpectedPrompt, PromptArrived
from twinpool.worker.request_table import RequestTable


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
        self.bytes = 0

    def __len__(self) -> int:
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
        borrowed = self._manager.prefix_transfer.reserve_for_pull(prefix, f"fetch {command.room}", spare=command.spare)
        if borrowed is None:
            return False
        allocation, lease = borrowed
        # Of other pools nothing is wanted, so they are granted as if all of them were held.
        held = {pool: set(numbers) for pool, numbers in due(self._manager.spec, positions).items()}
        held[self._manager.full] -= set(allocation.lacking[self._manager.full])
        if not self._receiver.grant(command.room, {self._manager.full: lease}, held):
            lease.release()
            self._manager.table.free(allocation)
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
            self._manager.prefix_transfer.insert_pulled(
                fetch.allocation, outcome.leases[full], outcome.digests.get(full, {})
            )
            nbytes = outcome.bytes
            self.bytes += nbytes
        else:
            # The room releases its leases by itself.
            self._manager.table.free(fetch.allocation)
        return [_done(fetch.session, fetch.command, nbytes)]

    def close(self) -> None:
        for fetch in self._fetches.values():
            self._receiver.abort(fetch.command.room, "the worker closes")
            self._manager.table.free(fetch.allocation)
        self._fetches.clear()


def _done(session: SessionId, command: PullPrefix, nbytes: int) -> RouterEvent:
    return RouterEvent(session, PullDone(command.request_id, command.attempt, nbytes))
