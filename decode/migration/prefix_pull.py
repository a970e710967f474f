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
from contracts.block_hash import chain_keys
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
    claim: Allocation


class PrefixPulls:
    """The fetching end. Called between steps, by the worker's thread."""

    def __init__(
        self, seat: KVCacheManager, receiver: KVReceiver, desk: RequestTable[DecodeRequest], *, reuse: bool
    ) -> None:
        """`reuse`: whether there is a tree to fetch for."""
        self._seat, self._receiver, self._desk, self._reuse = seat, receiver, desk, reuse
        self._fetches: dict[RoomId, _Pull] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._fetches)

    def handle(self, session: SessionId, command: PullPrefix) -> None:
        size = self._seat.spec.page_tokens
        positions = len(command.tokens) // size * size
        keys = chain_keys(command.tokens[:positions], size, command.salt)
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
        if not self._reuse or self._desk.draining or not positions:
            return False
        prefix = TokenPrefix.of(command.tokens[:positions], self._seat.spec.page_tokens, command.salt, keys)
        borrowed = self._seat.borrow(prefix, f"fetch {command.room}", spare=command.spare)
        if borrowed is None:
            return False
        claim, lease = borrowed
        # Of other pools nothing is wanted: that is as good as having it all.
        held = {pool: set(numbers) for pool, numbers in due(self._seat.spec, positions).items()}
        held[self._seat.full] -= set(claim.lacking[self._seat.full])
        if not self._receiver.grant(command.room, {self._seat.full: lease}, held):
            lease.release()
            self._seat.release(claim)
            return False
        self._fetches[command.room] = _Pull(session, command, claim)
        return True

    def hears(self, outcome: PromptArrived | HandoverFailed | PromptAnswered) -> bool:
        """Take the end of a room in; False when it isn't one of these."""
        fetch = self._fetches.pop(outcome.room, None)
        if fetch is None:
            return False
        nbytes = 0
        if isinstance(outcome, PromptArrived):
            full = self._seat.full
            self._seat.take(fetch.claim, outcome.leases[full], outcome.digests.get(full, {}))
            nbytes = outcome.bytes
            self.bytes += nbytes
        else:
            # The pages are the room's to give back.
            self._seat.release(fetch.claim)
        self._tell(fetch.session, fetch.command, nbytes)
        return True

    def _tell(self, session: SessionId, command: PullPrefix, nbytes: int) -> None:
        self._desk.tell(session, PullDone(command.request_id, command.attempt, nbytes))

    def close(self) -> None:
        for fetch in self._fetches.values():
            self._receiver.abort(fetch.command.room, "the worker closes")
            self._seat.release(fetch.claim)
        self._fetches.clear()
