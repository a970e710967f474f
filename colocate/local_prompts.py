"""The local prompts: a prompt source that computes prompts by steps of its own worker, and hands them over in place.

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

from twinpool.cache.prefix_cache.nodes.token_prefix import TokenPrefix
from twinpool.colocate.local_prompt import LocalPrompt, LocalPromptPages, leg_of
from twinpool.contracts.block_hash import block_hashes
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.worker_config import PrefillConfig
from twinpool.contracts.ids import RequestId, WorkerName
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.router_commands import Submit
from twinpool.contracts.messages.worker_events import Done, LegNote, LegReport
from twinpool.decode.request.request import DecodeEvent, DecodePhase, DecodeRequest
from twinpool.decode.request.request_outcomes import (
    PromptPreempted,
    PromptReceived,
    RequestFailed,
    RequestLeft,
    RouterEvent,
)
from twinpool.decode.transfer_queue import TransferQueue
from twinpool.engine.structured_output.answer_grammar import AnswerGrammar
from twinpool.prefill.first_token_events import first_token_events, unfinished_report
from twinpool.prefill.request import PrefillEvent, PrefillPhase, PrefillRequest
from twinpool.prefill.scheduler import PrefillScheduler, ScheduledChunk
from twinpool.prefill.step_commit import ChunkDone, ChunkFailed
from twinpool.prefill.step_cost import StepCost
from twinpool.transfer.rooms.metadata_slots import HandoverMetadata
from twinpool.transfer.rooms.receiver.receiver_rooms import ReceiverOutcome
from twinpool.worker.admission_check import AdmissionRefusal
from twinpool.worker.request_table import RequestTable

PromptOutcome = RouterEvent | RequestFailed | RequestLeft | PromptReceived | PromptPreempted


class LocalPrompts:
    """The prompts of one colocated worker; see the module's prose. Implements
    `decode.request.prompt_source.PromptSource`."""

    def __init__(
        self,
        name: WorkerName,
        rooms: TransferQueue,
        admitted: RequestTable[PrefillRequest],
        pages: LocalPromptPages,
        config: PrefillConfig,
        clock: Clock,
        cost: StepCost,
    ) -> None:
        """`rooms`: where prompts of requests come from that other workers computed. `admitted`: the prompts that have
        pages, which the step commit reads, too."""
        self._name, self._rooms, self._pages = name, rooms, pages
        self._config, self._clock = config, clock
        self._waiting: dict[RequestId, LocalPrompt] = {}
        """Prompts without pages."""
        self._admitted = admitted
        self._scheduler = PrefillScheduler(admitted, pages, lambda prompt: True, config, clock, cost)
        self._handed_over = self._preempted = 0

    def __len__(self) -> int:
        """Prompts that have pages and are being computed."""
        return len(self._admitted)

    @property
    def counters(self) -> Mapping[str, float]:
        return {
            **self._rooms.counters,
            **self._scheduler.counters,
            **self._pages.counters,
            "preemptions": self._preempted,
            "handed_over_in_place": self._handed_over,
        }

    @property
    def tokens_left(self) -> int:
        """Tokens of prompts that are still to be computed here."""
        return sum(prompt.left for prompt in self._all())

    @property
    def next_deadline(self) -> float | None:
        """When a read from storage ends at the latest that a prompt waits for, or a prompt must be begun, in seconds of
        the clock."""
        deadline = self._pages.manager.tiers.prefetcher.deadline
        due = [deadline(prompt.prefetch) for prompt in self._waiting.values() if prompt.prefetch is not None]
        due += [prompt.begin_by for prompt in self._all() if not prompt.begun]
        return min((at for at in due if at is not None), default=None)

    # ------------------------------------------------------------ what decode asks of a prompt source

    def open(
        self, session: SessionId, submit: Submit, grammar: AnswerGrammar | None
    ) -> DecodeRequest | AdmissionRefusal:
        """Take in a request: with a peer it is handed over in a room, without one its prompt is computed here."""
        if submit.peer is not None:
            return self._rooms.open(session, submit, grammar)
        now, page_tokens = self._clock.now(), self._pages.page_tokens
        chain = block_hashes(submit.tokens, page_tokens, submit.salt)
        prefix = TokenPrefix.of(submit.tokens, page_tokens, submit.salt, chain)
        deadline = now + submit.deadline_s
        leg = DecodeRequest(session, submit, now, deadline, prefix, grammar)
        begin_by = submit.begin_by(now)
        prompt = LocalPrompt(session, submit, now, deadline, prefix, chain, grammar=grammar, begin_by=begin_by, leg=leg)
        self._pages.prefetch(prompt)
        self._waiting[submit.request_id] = prompt
        return leg

    def waits(self, request: DecodeRequest) -> bool:
        """Whether another prompt is about to be computed whose pages this one can have, or storage is still reading."""
        prompt = self._waiting.get(request.submit.request_id)
        if prompt is None:
            return self._rooms.waits(request)
        return self._scheduler.waits(prompt, list(self._admitted))

    def preallocate(self, request: DecodeRequest) -> bool:
        """Allocate for the whole request and begin to compute its prompt; False without room, with nothing taken."""
        prompt = self._waiting.get(request.submit.request_id)
        if prompt is None:
            return self._rooms.preallocate(request)
        if len(self._admitted) >= self._config.max_running:
            return False
        while not self._pages.take(prompt):
            if not self._scheduler.give_up_prefetch(list(self._waiting.values())):
                return False
        self._scheduler.begin(prompt)
        del self._waiting[request.submit.request_id]
        self._admitted.add(prompt)
        return True

    def preempt(self, priority: int) -> DecodeRequest | None:
        """Take the pages of the youngest prompt of the lowest priority, which is no higher than `priority`."""
        able = [prompt for prompt in self._admitted if prompt.submit.priority <= priority]
        if not able:
            return None
        victim = min(reversed(able), key=lambda prompt: prompt.submit.priority)
        self._pages.preempt(victim)
        return self._send_back(victim)

    def make_way(self, request: DecodeRequest) -> DecodeRequest | None:
        """Take the pages of the youngest prompt of the tenant that has most of them here, where that has several and
        the request's own has none."""
        prompt = self._waiting.get(request.submit.request_id)
        victim = self._scheduler.overserved(prompt, list(self._admitted)) if prompt is not None else None
        if victim is None:
            return None
        self._pages.preempt(victim)
        return self._send_back(victim)

    def poll(self) -> Iterator[PromptReceived | RequestFailed | RequestLeft | ReceiverOutcome]:
        return self._rooms.poll()

    def abort(self, request: DecodeRequest, reason: str) -> LegReport | None:
        """Give up the request's prompt, if it isn't handed over yet. Idempotent. Returns what was done here for the
        prompt, where something was."""
        if request.submit.peer is not None:
            self._rooms.abort(request, reason)
            return None
        prompt = self._of(request)
        if prompt is None:
            return None
        if self._waiting.pop(request.submit.request_id, None) is None:
            self._admitted.remove(prompt)
        self._pages.free(prompt)
        self._pages.release_prefetch(prompt)
        prompt.step(PrefillEvent.END)
        return unfinished_report(prompt, self._name)

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
        return waiting or self._admitted.get(request.session, submit.request_id, submit.attempt)

    # ------------------------------------------------------------ steps

    def next_chunks(self, tokens: int) -> list[ScheduledChunk]:
        """Return the chunks of the next step, of `tokens` tokens at most."""
        return self._scheduler.next_batch(tokens) if len(self._admitted) else []

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
        for prompt in self._admitted:
            if prompt.phase is PrefillPhase.WAITING:
                yield PromptPreempted(self._send_back(prompt))

    def _send_back(self, prompt: PrefillRequest) -> DecodeRequest:
        assert isinstance(prompt, LocalPrompt)
        self._preempted += 1
        prompt.notes.append(LegNote("preempted", self._clock.now() - prompt.arrived))
        self._admitted.remove(prompt)
        self._waiting[prompt.submit.request_id] = prompt
        return prompt.leg

    def _complete(self, prompt: PrefillRequest) -> Iterator[PromptOutcome]:
        """Publish a finished prompt's first token, then end the request or hand it over."""
        prompt.step(PrefillEvent.COMPUTED)
        self._pages.cache(prompt)
        prompt.marks["prefill"] = self._clock.now() - prompt.arrived
        submit, drawn, leg = prompt.submit, prompt.first, leg_of(prompt)
        for event in first_token_events(prompt, self._name):
            yield RouterEvent(prompt.session, event)
        key, generated = (submit.request_id, submit.attempt), len(submit.emitted) + (drawn is not None)
        if drawn is not None and drawn.token in submit.sampling.stop_token_ids:
            yield RouterEvent(prompt.session, Done(*key, "stop", drawn.token))
            yield RequestLeft(leg, "stop")
        elif drawn is None or generated >= submit.sampling.max_tokens:
            yield RouterEvent(prompt.session, Done(*key, "length"))
            yield RequestLeft(leg, "length")
        else:
            metadata = HandoverMetadata(
                submit.room, 0, drawn.token, drawn.logprob, prompt.cached.total, prompt.computed
            )
            yield self._hand_over(prompt, leg, metadata)

    def _hand_over(self, prompt: PrefillRequest, leg: DecodeRequest, metadata: HandoverMetadata) -> PromptReceived:
        self._admitted.remove(prompt)
        given = self._pages.give(prompt)
        assert given is leg.allocation, "both halves hold one allocation"
        leg.step(DecodeEvent.ARRIVED)
        leg.start(metadata)
        leg.marks["arrived"] = self._clock.now() - leg.arrived
        self._handed_over += 1
        return PromptReceived(leg, 0)

    # ------------------------------------------------------------ ends

    def close(self) -> None:
        """Give nothing to the tree from here on: the worker closes."""
        self._pages.close()

    def check(self, requests: Iterable[DecodeRequest]) -> list[str]:
        """Recount, with all `requests` of the worker; returns what doesn't agree."""
        found = [wrong for prompt in self._all() for wrong in prompt.check()]
        here = {id(leg_of(prompt)): prompt for prompt in self._all()}
        for leg in requests:
            prompt = here.pop(id(leg), None)
            local = leg.submit.peer is None and leg.phase in (DecodePhase.WAITING, DecodePhase.ARRIVING)
            if local != (prompt is not None):
                found.append(f"request {leg.submit.request_id} is {leg.phase}, and its prompt is {prompt and 'here'}")
            elif prompt is not None and prompt.allocation is not leg.allocation:
                found.append(f"request {leg.submit.request_id} and its prompt hold different pages")
        return found + [f"prompt {prompt.submit.request_id} has no request" for prompt in here.values()]

    def _all(self) -> list[PrefillRequest]:
        return [*self._waiting.values(), *self._admitted]
