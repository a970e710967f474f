"""The transfer queue: opens the rooms of decode's requests, grants pages for their prompts, and takes in what arrived.

A room is opened when its request comes. Once the scheduler admits the request, pages and slots for what this worker
lacks of the prompt are granted to the room. When everything has arrived and is verified, they are the request's.

A colocated worker has another one, which computes prompts besides (`colocate.local_prompts`); `preempt` and `make_way`
are for prompts that are computed on this worker.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterator, Mapping

from twinpool.cache.device.device_port import DEVICE, Device, spans
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.errors import ErrorKind, WireError
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.router_commands import Submit
from twinpool.contracts.messages.worker_events import LegReport
from twinpool.decode.request import (
    DecodeEvent,
    DecodePages,
    DecodePhase,
    DecodeRequest,
    PromptReceived,
    RequestFailed,
    RequestLeft,
)
from twinpool.engine.structured_output.grammar_engine import AnswerGrammar
from twinpool.transfer.rooms.receiver.kv_receiver import KVReceiver
from twinpool.transfer.rooms.receiver.receiver_rooms import ReceiverOutcome
from twinpool.transfer.rooms.room_states import ExpectedPrompt, HandoverFailed, PromptArrived
from twinpool.worker.request_table import AdmissionRefusal, RequestTable

log = logging.getLogger("twinpool.decode")


class TransferQueue:
    """The receiving end of the rooms of decode's requests; see the module's prose."""

    def __init__(
        self,
        receiver: KVReceiver,
        requests: RequestTable[DecodeRequest],
        pages: DecodePages,
        device: Device,
        config: Config,
        clock: Clock,
    ) -> None:
        self._receiver, self._requests, self._pages = receiver, requests, pages
        self._manager, self._device, self._clock = pages.manager, device, clock
        self._prompt_wait_s = config.decode.prompt_wait_s
        self._counters = {"prompt_tokens_held": 0.0, "received_bytes": 0.0}

    @property
    def counters(self) -> Mapping[str, float]:
        return self._counters

    def open(
        self, session: SessionId, submit: Submit, grammar: AnswerGrammar | None = None
    ) -> DecodeRequest | AdmissionRefusal:
        """Open the room of a request; returns the request, or why it can't be taken."""
        if submit.peer is None:
            return AdmissionRefusal(ErrorKind.INVALID, "decode needs a prefill worker to receive from")
        prefix, keys = self._pages.prefix(submit)
        try:
            self._receiver.open(submit.room, submit.peer, ExpectedPrompt(tuple(keys), len(submit.tokens)))
        except WireError as error:
            return AdmissionRefusal(ErrorKind.ROOM, str(error))
        now = self._clock.now()
        return DecodeRequest(session, submit, now, now + submit.deadline_s, prefix, grammar)

    def preallocate(self, request: DecodeRequest) -> bool:
        """Allocate pages for the request's prompt and its next step, and grant its room what is lacking of them.

        Returns False without room for them, or where the grant is refused, with nothing taken.
        """
        submit = request.submit
        prompt, owner = len(submit.tokens), f"room {submit.room}"
        reserved = self._manager.allocations.preallocate(
            self._pages.reusable(request), prompt, request.positions_for(prompt + 1), owner, request.positions
        )
        if reserved is None:
            return False
        allocation, leases = reserved
        # From here on the prefill worker may write to them, so nothing that was launched may still use them.
        granted = {pool: lease.indices for pool, lease in leases.items()}
        self._device.touch(f"grant of {submit.room}", writes=spans(DEVICE, granted))
        if not self._receiver.grant(submit.room, leases, allocation.held()):
            self._manager.allocations.free(allocation)
            for lease in leases.values():
                lease.release()
            return False
        request.allocation = allocation
        self._counters["prompt_tokens_held"] += allocation.cached.total
        return True

    def waits(self, request: DecodeRequest) -> bool:
        """Whether another request is receiving pages that this one can have from the tree afterwards.

        This one waits only where at least half of the other prompt's pages are in common, so that it doesn't wait long
        for little, and for `decode.prompt_wait_s` at most. When the other request ends without its prompt, this one
        goes on by itself, or waits for the next.
        """
        if not self._pages.reuse or request.submit.migrating or not len(request.prefix):
            return False
        if request.behind is None or request.behind.phase is not DecodePhase.ARRIVING:
            request.behind = self._receiving(request)
        if request.behind is None:
            return False
        now = self._clock.now()
        request.behind_since = now if request.behind_since is None else request.behind_since
        return now - request.behind_since < self._prompt_wait_s

    def _receiving(self, request: DecodeRequest) -> DecodeRequest | None:
        """Return a request that is receiving more of this request's prompt than the device has; None without one. One
        in the background isn't waited for by any other: its prompt is computed when no other is."""
        salt, background = request.submit.salt, request.submit.background
        arriving = [
            r for r in self._requests
            if r.phase is DecodePhase.ARRIVING and r.submit.salt == salt and r.submit.background <= background
        ]  # fmt: skip
        there = self._manager.supply.cached_pages(request.prefix) if arriving else 0
        for other in arriving:
            most = min(len(request.prefix), len(other.prefix))
            # Keys are chained: pages are in common up to the first that differs.
            common = bisect_left(range(most), True, key=lambda n: request.prefix.key(n) != other.prefix.key(n))
            if common > there and 2 * common >= len(other.prefix):
                return other
        return None

    def preempt(self, priority: int) -> DecodeRequest | None:
        """Take the pages of one prompt back, of no higher priority than `priority`; returns its request, or None where
        there is no such prompt. Pages that a room was granted can't be taken back."""
        return None

    def make_way(self, request: DecodeRequest) -> DecodeRequest | None:
        """Take the pages of one prompt of a tenant that has several on their way back, where `request` is of a tenant
        that has none; returns that prompt's request, or None where no such prompt can give way, as in a room."""
        return None

    def poll(self) -> Iterator[PromptReceived | RequestFailed | RequestLeft | ReceiverOutcome]:
        """Yield what became of rooms, one by one. The outcome of a room without a request (that of a prefix pull) is
        yielded as it is."""
        outcomes = self._receiver.poll()
        if not outcomes:
            return
        by_room = {r.submit.room: r for r in self._requests}
        for outcome in outcomes:
            request = by_room.get(outcome.room)
            if request is None:
                yield outcome
            elif self._requests.holds(request):
                yield self._end(request, outcome)
            elif isinstance(outcome, PromptArrived):
                outcome.release()

    def _end(self, request: DecodeRequest, outcome: ReceiverOutcome) -> PromptReceived | RequestFailed | RequestLeft:
        if isinstance(outcome, PromptArrived):
            return self._receive(request, outcome)
        if isinstance(outcome, HandoverFailed):
            facts = {"request_id": request.submit.request_id, "attempt": request.submit.attempt, "room": outcome.room}
            log.warning("room failed: %s", outcome.message, extra=facts)
            return RequestFailed(request, outcome.kind, outcome.message, outcome.blame)
        return RequestLeft(request, "prefill ended it")

    def _receive(self, request: DecodeRequest, arrived: PromptArrived) -> PromptReceived:
        request.step(DecodeEvent.ARRIVED)
        self._manager.allocations.commit_transfer(
            request.held, len(request.submit.tokens), arrived.leases, arrived.digests
        )
        request.start(arrived.metadata)
        request.marks["arrived"] = self._clock.now() - request.arrived
        request.marks["hidden"], request.marks["exposed"] = arrived.hidden_s, arrived.exposed_s
        self._counters["received_bytes"] += arrived.bytes
        return PromptReceived(request, arrived.bytes)

    def abort(self, request: DecodeRequest, reason: str) -> LegReport | None:
        """Give up the request's room, if that is still open. The room releases what it holds by its own rules. Returns
        what was done on this worker for the prompt: nothing, its prefill worker reports it."""
        self._receiver.abort(request.submit.room, reason)
        return None
