"""The audit runner: computes finished answers again on an idle prefill worker, from nothing but their tokens.

An audit takes nothing from the tree or the tiers and leaves nothing there: all its pages are its own, every position is
computed, and at every position of the answer the token is drawn again, after the tokens that the client got. So damage
in the state that the answer was drawn from can't be in the audit's.

An audit never stands in a request's way. It runs when the worker has nothing else to do, one step of at most
`audit.chunk_tokens` tokens at a time, and each step is waited for, so between two rounds no step of it is under way. A
request that comes, or a drain, preempts it and frees its pages at once. It leaves one trace: the coldest pages of a
full tree are evicted to make room for it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from twinpool.cache.allocation import Allocation
from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.cache.prefix_cache.tree_node import TokenPrefix
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.damage import PREFIX, DamageSite, log_damage
from twinpool.contracts.ids import RequestId
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.router_commands import Audit, Cancel, Command, InvalidatePrefix
from twinpool.contracts.messages.worker_events import Audited, AuditEnd, Event
from twinpool.contracts.sampling_params import SamplingParams, TokenDifference
from twinpool.contracts.state_table import StateTable
from twinpool.engine.runner.batch import NONFINITE, BatchRow, KnownAnswer
from twinpool.engine.runner.model_runner import ModelRunner
from twinpool.engine.runner.sampling.logits_processors import TokenMask
from twinpool.engine.structured_output.grammar_engine import AnswerGrammar, GrammarError
from twinpool.worker.request_table import RequestGate


class AuditRunState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    OVER = "over"


class AuditRunEvent(StrEnum):
    ADMIT = "admit"
    DONE = "done"
    PREEMPT = "preempt"
    REFUSE = "refuse"


AUDITS = StateTable[AuditRunState, AuditRunEvent](
    "audit",
    {
        AuditRunState.WAITING: {
            AuditRunEvent.ADMIT: AuditRunState.RUNNING,
            AuditRunEvent.PREEMPT: AuditRunState.OVER,
            AuditRunEvent.REFUSE: AuditRunState.OVER,
        },
        AuditRunState.RUNNING: {
            AuditRunEvent.DONE: AuditRunState.OVER,
            AuditRunEvent.PREEMPT: AuditRunState.OVER,
            AuditRunEvent.REFUSE: AuditRunState.OVER,
        },
    },
)


@dataclass(eq=False)
class AuditRun:
    """One audit on this worker: its command, its state, and the result so far."""

    session: SessionId
    audit: Audit
    grammar: AnswerGrammar | None = None
    """What the answer follows."""
    state: AuditRunState = AuditRunState.WAITING
    allocation: Allocation | None = None
    committed: int = 0
    """Positions whose state is computed."""
    checked: int = 0
    """Tokens of the answer that were drawn again."""
    differing: int = 0
    """How many of those came out differently."""
    differences: list[TokenDifference] = field(default_factory=list)
    """The first of those, for the report."""

    @property
    def held(self) -> Allocation:
        """The allocation, for callers that know by the state that there is one."""
        assert self.allocation is not None, f"{self.state} without an allocation"
        return self.allocation


log = logging.getLogger("twinpool.prefill")
MAX_WAITING = 4
"""Audits that may wait. A router sends one at a time; they come from several routers."""
MAX_TOLD = 16
"""Differences that an `Audited` event lists at most."""


class AuditRunner:
    """The audits of one prefill worker; see the module's prose. Single-threaded, driven by its worker."""

    def __init__(
        self,
        config: Config,
        engine: ModelRunner,
        manager: KVCacheManager,
        tell: Callable[[SessionId, Event], None],
        nonfinite: Callable[[], None],
        max_positions: int,
        grammars: RequestGate,
    ) -> None:
        """`tell` emits an event. `nonfinite` is called for each row with non-finite logits. `max_positions`: the
        longest answer, prompt included, that this worker can hold, in tokens."""
        self._engine, self._manager, self._tell, self._nonfinite = engine, manager, tell, nonfinite
        self._chunk = min(config.audit.chunk_tokens, config.prefill.chunk_tokens)
        self._most, self._grammars = max_positions, grammars
        # Workers whose ranks divide a model otherwise add in different orders: they agree within rounding only.
        alike = (config.prefill.tp, config.prefill.ep) == (config.decode.tp, config.decode.ep)
        self._exact = config.engine.numerics == "invariant" and alike
        self._margin = config.audit.margin
        self._waiting: deque[AuditRun] = deque()
        self._running: AuditRun | None = None
        names = ("audits_computed", "audits_preempted", "audit_tokens_computed", f"{PREFIX}{DamageSite.STEP}")
        self.counters = dict.fromkeys(names, 0.0)

    def __len__(self) -> int:
        return len(self._waiting) + (self._running is not None)

    def sampled(self) -> list[SamplingParams]:
        """Return the parameters of all of them."""
        return [audition.audit.sampling for audition in self._all()]

    @property
    def allocations(self) -> int:
        """Allocations of the KV cache manager that audits hold."""
        return int(self._running is not None and self._running.allocation is not None)

    def check(self) -> list[str]:
        """Recount; returns what doesn't agree."""
        found = [f"audit {a.audit.request_id} waits and is {a.state}" for a in self._waiting if a.state != "waiting"]
        running = self._running
        if running is not None and (running.state is not AuditRunState.RUNNING or running.allocation is None):
            found.append(
                f"audit {running.audit.request_id} runs, is {running.state}, and its allocation is {running.allocation}"
            )
        return found + [
            f"audit {a.audit.request_id} waits with an allocation" for a in self._waiting if a.allocation is not None
        ]

    # ------------------------------------------------------------ what comes and goes

    def handle(self, session: SessionId, command: Command, grammar: AnswerGrammar | None = None, *, busy: bool) -> bool:
        """Take in a command as far as it concerns audits; returns whether the command is done with.

        An `InvalidatePrefix` is carried out here; a `Cancel` is for the worker too. `busy`: the worker has other work
        to do, so a new audit is preempted at once.
        """
        if isinstance(command, Audit):
            self._take(session, command, grammar, busy=busy)
        elif isinstance(command, InvalidatePrefix):
            self._manager.finished.invalidate(
                TokenPrefix.of(command.tokens, self._manager.spec.page_tokens, command.salt)
            )
        elif isinstance(command, Cancel):
            self._cancel(session, command.request_id)
        return isinstance(command, Audit | InvalidatePrefix)

    def _take(self, session: SessionId, audit: Audit, grammar: AnswerGrammar | None, *, busy: bool) -> None:
        audition = AuditRun(session, audit, grammar)
        if not 0 < audit.prompt_len < len(audit.tokens) <= self._most:
            message = f"{len(audit.tokens)} tokens with a prompt of {audit.prompt_len}; at most {self._most} fit"
            self._end(audition, AuditRunEvent.REFUSE, AuditEnd.REFUSED, message)
        elif busy or len(self._waiting) >= MAX_WAITING:
            self._preempt(audition, "the worker is busy")
        else:
            self._waiting.append(audition)

    def _cancel(self, session: SessionId, request_id: RequestId) -> None:
        """End the audits of this id without an event: their router has cancelled them."""
        for audition in self._all():
            if audition.session == session and audition.audit.request_id == request_id:
                self._leave(audition, AuditRunEvent.PREEMPT)

    def drop_session(self, session: SessionId) -> None:
        """End the session's audits without an event: its router is gone."""
        for audition in self._all():
            if audition.session == session:
                self._leave(audition, AuditRunEvent.PREEMPT)

    def preempt(self, reason: str) -> None:
        """Preempt every audit and free what it holds, at once: the worker has other work to do."""
        for audition in self._all():
            self._preempt(audition, reason)

    def close(self) -> None:
        for audition in self._all():
            self._leave(audition, AuditRunEvent.PREEMPT)

    def _all(self) -> list[AuditRun]:
        return [*([self._running] if self._running is not None else []), *self._waiting]

    # ------------------------------------------------------------ progress

    def step(self) -> None:
        """Compute one chunk of the running audit, or of the next one, and wait for it."""
        audition = self._running or self._admit()
        if audition is None:
            return
        audit, start = audition.audit, audition.committed
        # The last token's state isn't needed: nothing was drawn after it.
        end = self._manager.running.extend(audition.held, min(len(audit.tokens) - 1, start + self._chunk))
        (output,) = self._engine.launch([self._row(audition, start, end)]).outputs()
        if output.stale:
            self.counters[f"{PREFIX}{DamageSite.STEP}"] += 1
            log_damage(log, DamageSite.STEP, request_id=audit.request_id, positions=[start, end])
            self._end(audition, AuditRunEvent.REFUSE, AuditEnd.REFUSED, "a step found a page of it given away")
            return
        if output.nonfinite:
            self._nonfinite()
            log_damage(log, DamageSite.LOGITS, request_id=audit.request_id, positions=[start, end])
            self._end(audition, AuditRunEvent.REFUSE, AuditEnd.REFUSED, NONFINITE)
            return
        self.counters["audit_tokens_computed"] += end - start
        audition.committed = end
        audition.checked += output.replayed
        self._judge(audition, output.differences)
        if end == len(audit.tokens) - 1:
            self.counters["audits_computed"] += 1
            self._end(audition, AuditRunEvent.DONE, AuditEnd.COMPUTED)
        else:
            self._manager.running.free_window_pages(audition.held, end)

    def _admit(self) -> AuditRun | None:
        if not self._waiting:
            return None
        audition = self._waiting.popleft()
        nothing = TokenPrefix.of((), self._manager.spec.page_tokens)
        positions = len(audition.audit.tokens) - 1
        allocation = self._manager.allocations.allocate(
            nothing, positions, f"audit {audition.audit.request_id}", reusable=0
        )
        if allocation is None:
            self._preempt(audition, "no room for it now")
            return None
        audition.allocation = allocation
        audition.state = AUDITS.next(audition.state, AuditRunEvent.ADMIT)
        self._running = audition
        self._manager.launch()
        return audition

    def _row(self, audition: AuditRun, start: int, end: int) -> BatchRow:
        audit, allocation = audition.audit, audition.held
        tables = self._manager.running.block_tables(allocation, start, end)
        known = KnownAnswer(audit.sampling, audit.tokens, audit.prompt_len)
        if audition.grammar is not None:
            masks = self._masks(audition.grammar, audit, known.positions(start, end - start))
            known = replace(known, masks=masks)
        return BatchRow(audit.tokens[start:end], start, tables, replay=known, adapter=audit.sampling.adapter)

    def _masks(self, grammar: AnswerGrammar, audit: Audit, positions: range) -> Mapping[int, TokenMask]:
        """The masks of the tokens at `positions`, up to the first one that its grammar doesn't allow."""
        try:
            matcher = grammar.behind(audit.tokens[audit.prompt_len : positions.start])
        except GrammarError:
            return {}  # The token before isn't allowed: that was found.
        answer = audit.tokens[positions.start : positions.stop - 1]
        (masks,) = self._grammars.masks([(matcher, answer[: matcher.fitting(answer)])])
        return {} if isinstance(masks, GrammarError) else dict(zip(positions, masks, strict=False))

    def _judge(self, audition: AuditRun, found: tuple[TokenDifference, ...]) -> None:
        """Count the tokens that differ and keep the first of them for the report; where numerics aren't exact, those
        with a gap beyond `audit.margin`."""
        audition.differing += len(found)
        beyond = [d for d in found if self._exact or d.gap > self._margin]
        audition.differences += beyond[: MAX_TOLD - len(audition.differences)]

    # ------------------------------------------------------------ ends

    def _preempt(self, audition: AuditRun, reason: str) -> None:
        self.counters["audits_preempted"] += 1
        self._end(audition, AuditRunEvent.PREEMPT, AuditEnd.PREEMPTED, reason)

    def _end(self, audition: AuditRun, event: AuditRunEvent, end: AuditEnd, message: str = "") -> None:
        audit = audition.audit
        whole = end is AuditEnd.COMPUTED
        audited = Audited(
            audit.request_id,
            audit.attempt,
            end,
            audition.checked if whole else 0,
            audition.differing if whole else 0,
            tuple(audition.differences) if whole else (),
            self._exact,
            message,
        )
        self._tell(audition.session, audited)
        self._leave(audition, event)

    def _leave(self, audition: AuditRun, event: AuditRunEvent) -> None:
        """Free what the audit holds and take it out of the queue. Every audit ends through here."""
        audition.state = AUDITS.next(audition.state, event)
        if audition.allocation is not None:
            self._manager.allocations.free(audition.allocation)
            audition.allocation = None
        if self._running is audition:
            self._running = None
        elif audition in self._waiting:
            self._waiting.remove(audition)
