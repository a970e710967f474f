"""Pages that come from another decode worker's tree into this one's; `decode.migration.prefix_push` has the other end.

open       a room is open, and pages of the full pool are borrowed and granted
over       all came and match their tags: the tree has them; or they didn't, and the pages are back
"""

from __future__ import annotations

from dataclasses import dataclass

from cache.allocation.allocation import Allocation
from cache.manager.kv_cache_manager import KVCacheManager
from cache.memory.required_pages import due
from cache.prefix_cache.token_prefix import TokenPrefix
from contracts.block_hash import block_hashes
from contracts.errors import WireError
from contracts.ids import RoomId
from contracts.interfaces.worker_interface import SessionId
from contracts.messages.router_commands import PullPrefix
from contracts.messages.worker_events import PullDone
from decode.request.request import DecodeRequest
from transfer.rooms.kv_receiver import KVReceiver
from transfer.rooms.room_outcomes import ExpectedPrompt, HandoverFailed, PromptAnswered, PromptArrived
from worker.request_table import RequestTable


@dataclass(frozen=True, eq=False)
class _Pull:
    session: SessionId
    command: PullPrefix
    allocation: Allocation


class PrefixPulls:
    """The fetching end. Called between steps, by the worker's thread."""

    def __init__(
        self, manager: KVCacheManager, receiver: KVReceiver, request_table: RequestTable[DecodeRequest], *, reuse: bool
    ) -> None:
        """`reuse`: whether there is a tree to fetch for."""
        self._manager, self._receiver, self._request_table, self._reuse = manager, receiver, request_table, reuse
        self._fetches: dict[RoomId, _Pull] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._fetches)

    def handle(self, session: SessionId, command: PullPrefix) -> None:
        size = self._manager.spec.page_tokens
        positions = len(command.tokens) // size * size
        keys = block_hashes(command.tokens[:positions], size, command.salt)
        try:
            self._receiver.open(command.room, command.peer, ExpectedPrompt(tuple(keys), positions))
        except WireError:
            self._tell(session, command, 0)
            return
        if not self._begin(session, command, keys, positions):
            # The room is given up by who is known to be there: the other end hears of it at once.
            self._receiver.abort(command.room, "nothing of it is wanted here, or there is no room for it")
            self._tell(session, command, 0)

    def _begin(self, session: SessionId, command: PullPrefix, keys: list[bytes], positions: int) -> bool:
        if not self._reuse or self._request_table.draining or not positions:
            return False
        prefix = TokenPrefix.of(command.tokens[:positions], self._manager.spec.page_tokens, command.salt, keys)
        borrowed = self._manager.reserve_for_pull(prefix, f"fetch {command.room}", spare=command.spare)
        if borrowed is None:
            return False
        allocation, lease = borrowed
        # Of other pools nothing is wanted: that is as good as having it all.
        held = {pool: set(numbers) for pool, numbers in due(self._manager.spec, positions).items()}
        held[self._manager.full] -= set(allocation.lacking[self._manager.full])
        if not self._receiver.grant(command.room, {self._manager.full: lease}, held):
            lease.release()
            self._manager.free(allocation)
            return False
        self._fetches[command.room] = _Pull(session, command, allocation)
        return True

    def on_room(self, outcome: PromptArrived | HandoverFailed | PromptAnswered) -> bool:
        """Take the end of a room in; False when it isn't one of these."""
        fetch = self._fetches.pop(outcome.room, None)
        if fetch is None:
            return False
        nbytes = 0
        if isinstance(outcome, PromptArrived):
            full = self._manager.full
            self._manager.insert_pulled(fetch.allocation, outcome.leases[full], outcome.digests.get(full, {}))
            nbytes = outcome.bytes
            self.bytes += nbytes
        else:
            # The pages are the room's to give back.
            self._manager.free(fetch.allocation)
        self._tell(fetch.session, fetch.command, nbytes)
        return True

    def _tell(self, session: SessionId, command: PullPrefix, nbytes: int) -> None:
        self._request_table.emit(session, PullDone(command.request_id, command.attempt, nbytes))

    def close(self) -> None:
        for fetch in self._fetches.values():
            self._receiver.abort(fetch.command.room, "the worker closes")
            self._manager.free(fetch.allocation)
        self._fetches.clear()
