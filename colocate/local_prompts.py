"""The local prompts: a transfer queue that also computes prompts, by steps of its own worker, and hands them over in
place.

A request waits for pages like any other of decode. When it gets them, its prompt is computed in chunks, as on a prefill
worker, by the same scheduler and step commit; the request is arriving meanwhile. With the last chunk its first token is
published, and the allocation, which both halves have held all along, is decode's alone: a lease has changed hands, and
no byte was copied, checked or waited for.

Decode's memory rules hold for both halves, as there is one queue for pages: retracted requests come back first, then
new ones are admitted in order of arrival, with all pages of their prompts at once, and where there is room for what all
holders are expected to grow by. So a prompt that was admitted needs no other page before it is a running request, and
becomes one in a bounded number of steps. Where a running request is short of a page, the youngest prompt that is being
computed gives way before any running request is retracted: it loses steps, and finds its finished pages in the tree.

Requests of other workers, which migrate to this one, come through rooms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from twinpool.cache.allocation import Allocation
from twinpool.cache.device.device_port import Device
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.ids import RequestId
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.router_commands import Submit, without_pixels
from twinpool.contracts.messages.worker_events import Done, LegNote, LegReport
from twinpool.decode.request import (
    DecodeEvent,
    DecodePages,
    DecodePhase,
    DecodeRequest,
    PromptPreempted,
    PromptReceived,
    RequestFailed,
    RequestLeft,
    RouterEvent,
)
from twinpool.decode.transfer_queue import TransferQueue
from twinpool.engine.structured_output.grammar_engine import AnswerGrammar
from twinpool.prefill.request import (
    PrefillEvent,
    PrefillPages,
    PrefillPhase,
    PrefillRequest,
    UnfitPictures,
    first_token_events,
    unfinished_report,
)
from twinpool.prefill.scheduler import PrefillScheduler, ScheduledChunk, StepCost
from twinpool.prefill.step_commit import ChunkDone, ChunkFailed
from twinpool.transfer.rooms.receiver.kv_receiver import KVReceiver
from twinpool.transfer.rooms.room_messages import HandoverMetadata
from twinpool.worker.request_table import AdmissionRefusal, RequestTable


@dataclass(eq=False, kw_only=True)
class LocalPrompt(PrefillRequest):
    """The prefill half of one request of a colocated worker; `leg` is the decode half."""

    leg: DecodeRequest


class LocalPromptPages(PrefillPages):
    """The pages of prompts whose requests go on here.

    An allocation is made for the whole request, and both halves hold the same one: the prompt while it is computed, its
    request before and after. The hand-over is `give`.
    """

    def take(self, request: PrefillRequest) -> bool:
        """Allocate pages for the prompt and the first step after it, and of windows and states what the request will
        ever hold at once; on False nothing was taken."""
        leg = leg_of(request)
        end = leg.positions_for(len(request.tokens) + 1)
        if not self._take(request, end, leg.positions):
            return False
        leg.allocation = request.allocation
        return True

    def cache(self, request: PrefillRequest) -> None:
        """Give the request's finished pages to the tree at once, locked until it is freed; others may wait for them.

        Pages of windows go there only as far as there are others in their place: the request was admitted with what it
        needs to its end, and must still have that.
        """
        allocation = request.allocation
        if not self.reuse or allocation is None or allocation.invalid:
            return
        growth = self.manager.running
        windows = growth.replace_windows(allocation, min(len(request.prefix), request.committed // self.page_tokens))
        self.manager.finished.cache_pages(allocation, request.prefix, request.submit.priority, windows=windows)
        growth.trim(allocation)
        request.shared = request.committed

    def free(self, request: PrefillRequest) -> None:
        """Give the request's finished pages to the tree and free the rest. Idempotent: nothing is held afterwards."""
        super().free(request)
        leg_of(request).allocation = None

    def give(self, request: PrefillRequest) -> Allocation:
        """Hand the allocation over to the request's decode half, which has held it all along; no byte is copied."""
        given = request.held
        request.allocation = None
        request.step(PrefillEvent.END)
        return given


def leg_of(request: PrefillRequest) -> DecodeRequest:
    """Return the decode half of a prompt; all prompts of a colocated worker have one."""
    assert isinstance(request, LocalPrompt), "a colocated worker's prompts go on here"
    return request.leg


PromptOutcome = RouterEvent | RequestFailed | RequestLeft | PromptReceived | PromptPreempted


class LocalPrompts(TransferQueue):
    """The prompts of one colocated worker, those that others computed included; see the module's prose."""

    def __init__(
        self,
        receiver: KVReceiver,
        requests: RequestTable[DecodeRequest],
        pages: DecodePages,
        device: Device,
        config: Config,
        clock: Clock,
    ) -> None:
        super().__init__(receiver, requests, pages, device, config, clock)
        self._config = config.prefill
        self._waiting: dict[RequestId, LocalPrompt] = {}
        """Prompts without pages."""
        self.admitted = RequestTable[PrefillRequest](requests.name, requests.fits, clock)
        """The prompts that have pages and are being computed. The step commit reads them, too."""
        self.prompt_pages = LocalPromptPages(pages.manager, reuse=pages.reuse)
        self.cost = StepCost(config.prefill.chunk_tokens)
        self._scheduler = PrefillScheduler(
            self.admitted, self.prompt_pages, lambda prompt: True, config.prefill, clock, self.cost
        )
        self.rest = self._scheduler.rest
        self._handed_over = self._preempted = 0

    @property
    def counters(self) -> Mapping[str, float]:
        return {
            **super().counters,
            **self._scheduler.counters,
            **self.prompt_pages.counters,
            "preemptions": self._preempted,
            "handed_over_in_place": self._handed_over,
        }

    @property
    def tokens_left(self) -> int:
        """Tokens of prompts that are still to be computed here."""
        return sum(prompt.left for prompt in self._all())

    @property
    def next_deadline(self) -> float | None:
        """When a read from storage ends at the latest that a prompt waits for, a prompt must be begun, or background
        ones have rested, in seconds of the clock."""
        due = self.prompt_pages.next_due(self._all()), self.rest.ends(self.admitted)
        return min((at for at in due if at is not None), default=None)

    # ------------------------------------------------------------ what decode asks for

    def open(
        self, session: SessionId, submit: Submit, grammar: AnswerGrammar | None = None
    ) -> DecodeRequest | AdmissionRefusal:
        """Take in a request: with a peer it is handed over in a room, without one its prompt is computed here."""
        if submit.peer is not None:
            return super().open(session, submit, grammar)
        try:
            pictures = self.prompt_pages.placed(submit, self._all())
        except UnfitPictures as error:
            return AdmissionRefusal(error.kind, str(error))
        now, (prefix, chain) = self._clock.now(), self._pages.prefix(submit)
        deadline = now + submit.deadline_s
        leg = DecodeRequest(session, without_pixels(submit), now, deadline, prefix, grammar)
        begin_by = submit.begin_by(now)
        prompt = LocalPrompt(
            session, submit, now, deadline, prefix, grammar, chain=chain, begin_by=begin_by, pictures=pictures, leg=leg
        )
        self.prompt_pages.prefetch(prompt)
        self._waiting[submit.request_id] = prompt
        return leg

    def waits(self, request: DecodeRequest) -> bool:
        """Whether another prompt is about to be computed whose pages this one can have, or storage is still reading."""
        prompt = self._waiting.get(request.submit.request_id)
        if prompt is None:
            return super().waits(request)
        return self._scheduler.waits(prompt, list(self.admitted))

    def preallocate(self, request: DecodeRequest) -> bool:
        """Allocate for the whole request and begin to compute its prompt; False without room, with nothing taken."""
        prompt = self._waiting.get(request.submit.request_id)
        if prompt is None:
            return super().preallocate(request)
        if len(self.admitted) >= self._config.max_running:
            return False
        while not self.prompt_pages.take(prompt):
            if not self._scheduler.give_up_prefetch(list(self._waiting.values())):
                return False
        self._scheduler.begin(prompt)
        del self._waiting[request.submit.request_id]
        self.admitted.add(prompt)
        return True

    def preempt(self, priority: int) -> DecodeRequest | None:
        """Take the pages of the youngest prompt of the lowest priority, which is no higher than `priority`."""
        able = [prompt for prompt in self.admitted if prompt.submit.priority <= priority]
        if not able:
            return None
        victim = min(reversed(able), key=lambda prompt: prompt.submit.priority)
        self.prompt_pages.preempt(victim)
        return self._send_back(victim)

    def make_way(self, request: DecodeRequest) -> DecodeRequest | None:
        """Take the pages of the youngest prompt of the tenant that has most of them here, where that has several and
        the request's own has none."""
        prompt = self._waiting.get(request.submit.request_id)
        victim = self._scheduler.overserved(prompt, list(self.admitted)) if prompt is not None else None
        if victim is None:
            return None
        self.prompt_pages.preempt(victim)
        return self._send_back(victim)

    def abort(self, request: DecodeRequest, reason: str) -> LegReport | None:
        """Give up the request's prompt, if it isn't handed over yet. Idempotent. Returns what was done here for the
        prompt, where something was."""
        if request.submit.peer is not None:
            return super().abort(request, reason)
        prompt = self._of(request)
        if prompt is None:
            return None
        if self._waiting.pop(request.submit.request_id, None) is None:
            self.admitted.remove(prompt)
        self.prompt_pages.free(prompt)
        self.prompt_pages.release_prefetch(prompt)
        prompt.step(PrefillEvent.END)
        return unfinished_report(prompt, self._requests.name)

    def hand_to(self, session: SessionId, request: DecodeRequest) -> None:
        """Make the request's prompt, if it is computed here, another session's; the request follows."""
        prompt = self._of(request) if request.submit.peer is None else None
        if prompt is not None:
            prompt.session = session

    def late(self, request: DecodeRequest) -> bool:
        """Whether it is too late to begin a request's prompt."""
        prompt = self._of(request)
        return prompt is not None and prompt.late(self._clock.now())

    def _of(self, request: DecodeRequest) -> PrefillRequest | None:
        submit = request.submit
        waiting = self._waiting.get(submit.request_id)
        return waiting or self.admitted.get(request.session, submit.request_id, submit.attempt)

    # ------------------------------------------------------------ steps

    def next_chunks(self, tokens: int, *, beside: bool) -> list[ScheduledChunk]:
        """Return the chunks of the next step, of `tokens` tokens at most. `beside`: as of the scheduler's batch."""
        return self._scheduler.next_batch(tokens, beside=beside) if len(self.admitted) else []

    def landed(self, results: Iterable[ChunkDone | ChunkFailed]) -> Iterator[PromptOutcome]:
        """Take in what came of chunks, one by one; the caller must act on each outcome before it takes the next."""
        for told in results:
            if isinstance(told, ChunkFailed):
                yield RequestFailed(leg_of(told.request), told.kind, told.message)
            elif told.request.committed == len(told.request.tokens):
                yield from self._complete(told.request)
        yield from self.restarted()

    def restarted(self) -> Iterator[PromptPreempted]:
        """Yield the requests whose prompts the step commit has sent back to waiting: state of theirs was damaged."""
        for prompt in self.admitted:
            if prompt.phase is PrefillPhase.WAITING:
                yield PromptPreempted(self._send_back(prompt))

    def _send_back(self, prompt: PrefillRequest) -> DecodeRequest:
        assert isinstance(prompt, LocalPrompt)
        self._preempted += 1
        prompt.notes.append(LegNote("preempted", self._clock.now() - prompt.arrived))
        self.admitted.remove(prompt)
        self._waiting[prompt.submit.request_id] = prompt
        return prompt.leg

    def _complete(self, prompt: PrefillRequest) -> Iterator[PromptOutcome]:
        """Publish a finished prompt's first token, then end the request or hand it over."""
        prompt.step(PrefillEvent.COMPUTED)
        self.prompt_pages.cache(prompt)
        prompt.marks["prefill"] = self._clock.now() - prompt.arrived
        submit, drawn, leg = prompt.submit, prompt.first, leg_of(prompt)
        for event in first_token_events(prompt, self._requests.name):
            yield RouterEvent(prompt.session, event)
        key, generated = (submit.request_id, submit.attempt), len(submit.emitted) + (drawn is not None)
        if drawn is not None and drawn.token in submit.sampling.stop_token_ids:
            yield RouterEvent(prompt.session, Done(*key, "stop", drawn.token))
            yield RequestLeft(leg, "stop")
        elif drawn is None or generated >= submit.sampling.max_tokens:
            yield RouterEvent(prompt.session, Done(*key, "length"))
            yield RequestLeft(leg, "length")
        else:
            self.admitted.remove(prompt)
            given = self.prompt_pages.give(prompt)
            assert given is leg.allocation, "both halves hold one allocation"
            leg.step(DecodeEvent.ARRIVED)
            cached, computed = prompt.cached.total, prompt.computed
            leg.start(HandoverMetadata(submit.room, 0, drawn.token, drawn.logprob, cached, computed))
            leg.marks["arrived"] = self._clock.now() - leg.arrived
            self._handed_over += 1
            yield PromptReceived(leg, 0)

    # ------------------------------------------------------------ ends

    def check(self) -> list[str]:
        """Recount, with all requests of the worker; returns what doesn't agree."""
        found = [wrong for prompt in self._all() for wrong in prompt.check()]
        here = {id(leg_of(prompt)): prompt for prompt in self._all()}
        for leg in self._requests:
            prompt = here.pop(id(leg), None)
            local = leg.submit.peer is None and leg.phase in (DecodePhase.WAITING, DecodePhase.ARRIVING)
            if local != (prompt is not None):
                found.append(f"request {leg.submit.request_id} is {leg.phase}, and its prompt is {prompt and 'here'}")
            elif prompt is not None and prompt.allocation is not leg.allocation:
                found.append(f"request {leg.submit.request_id} and its prompt hold different pages")
        return found + [f"prompt {prompt.submit.request_id} has no request" for prompt in here.values()]

    def _all(self) -> list[PrefillRequest]:
        return [*self._waiting.values(), *self.admitted]
