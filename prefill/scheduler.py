"""The prefill scheduler: which requests are admitted, and which chunks of prompts the next step computes.

The order of admission is one policy here: requests to which decode has granted pages, and those that prefill answers
alone, come first; among them the ones of a higher priority; among these tenants have fair shares, by the tokens that
are computed for them (`worker.fair_shares`); and each tenant's come in order of arrival. Who comes first may preempt
requests that have no grant yet, so a request that holds decode's memory always gets on.

The division of a step is the other: by priority, then in fair shares, and within a tenant's part mostly in order of
arrival.

A step that is under way can't be cut, so its length is what a prompt that comes finds ahead of it whatever the order.
While a tenant is expected that isn't the only one with prompts (`worker.fair_shares`), steps are kept short, and
have no more of other tenants' tokens in them than that where one computes what it had saved up. So where there are no
tenants, or one alone has had work for a while, nothing is as if there were others.

What a step of so many tokens takes is known by the steps before it (`StepCost`). A step takes about `a + b n + c n p`
seconds: `n` tokens at positions that are `p` on average. So what a step costs however small it is (`a`: a launch, rows
of decode) isn't taken for the price of tokens, and the far end of a long prompt, where attention reads more, is known
to cost more than its beginning. The three are fitted by least squares that forget, drawn a little towards 0, which
decides where steps that were all alike can't.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from twinpool.contracts.clock import Clock
from twinpool.contracts.config.worker_config import PrefillConfig
from twinpool.contracts.messages.worker_events import LegNote
from twinpool.engine.runner.batch import BatchRow, TokenDraw
from twinpool.engine.runner.sampling.logits_processors import TokenMask
from twinpool.prefill.request import PrefillEvent, PrefillPages, PrefillPhase, PrefillRequest, launchable
from twinpool.worker.fair_shares import FairShares, TenantReturns
from twinpool.worker.request_table import RequestTable

REMEMBERED = 0.97
"""Weight of a step after the next one: about the last thirty count."""
MIN_STEPS = 4
"""Steps below which nothing is known."""
MAX_TIMES = 3.0
"""A step that took more than so many times what was expected counts as that: something else was in the way."""
_PRIOR = np.diag([0.3, 0.003, 0.003])
"""Squared pull towards 0 of `a`, `b` and `c`, by units of `unit` tokens."""


class StepCost:
    """The fit of one worker. `unit`: tokens of a usual step, a scale alone."""

    def __init__(self, unit: int) -> None:
        self._unit = float(unit)
        self._steps = 0
        self._squares = np.zeros((3, 3))
        self._products = np.zeros(3)
        self._fit: tuple[float, float, float] | None = None

    def saw(self, tokens: int, positions: int, seconds: float) -> None:
        """Take in that a step of `tokens` tokens took so long; `positions`: the sum of the positions of all."""
        if tokens <= 0 or not 0 < seconds < math.inf:
            return
        sizes = np.array([1.0, tokens / self._unit, positions / self._unit**2])
        expected = self.seconds(tokens, positions)
        if expected is not None and self._steps >= 2 * MIN_STEPS:
            seconds = min(seconds, MAX_TIMES * expected)
        self._steps += 1
        self._squares = self._squares * REMEMBERED + np.outer(sizes, sizes)
        self._products = self._products * REMEMBERED + sizes * seconds
        self._fit = None

    def seconds(self, tokens: int, positions: int) -> float | None:
        """Return the seconds of a step, as `saw` takes it; None before anything is known."""
        if self._steps < MIN_STEPS:
            return None
        a, b, c = self._solved()
        return a + b * tokens + c * positions

    def tokens_within(self, seconds: float, start: int) -> float | None:
        """Return how many tokens of a prompt from position `start` on add about so many seconds to a step; None before
        anything is known."""
        if self._steps < MIN_STEPS:
            return None
        _, b, c = self._solved()
        first = b + c * start
        # first * n + c * n * n / 2 = seconds
        under = first + math.sqrt(first * first + 2 * c * seconds)
        return 2 * seconds / under if under > 0 else math.inf

    def _solved(self) -> tuple[float, float, float]:
        """The seconds of a step, of a token, and of a token's position. None is negative: what would be is left out."""
        if self._fit is None:
            kept = [0, 1, 2]
            found = np.zeros(3)
            while kept:
                squares = (self._squares + _PRIOR)[np.ix_(kept, kept)]
                solved = np.linalg.solve(squares, self._products[kept])
                if (solved >= 0).all():
                    found[kept] = solved
                    break
                del kept[int(solved.argmin())]
            self._fit = float(found[0]), float(found[1]) / self._unit, float(found[2]) / self._unit**2
        return self._fit


_MIN_SHARED = 8
"""Short steps have at least this part of a step's budget, so that what each step costs doesn't become all that they
do."""


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The next positions of one prompt, as a row of the step that computes them."""

    request: PrefillRequest
    row: BatchRow


class BackgroundRest:
    """The rest of background prompts after steps with others (`prefill.background_rest_s`)."""

    def __init__(self, config: PrefillConfig, clock: Clock) -> None:
        self._config, self._clock = config, clock
        self._until = -math.inf

    def begin(self) -> None:
        """They rest from now on, or longer."""
        self._until = self._clock.now() + self._config.background_rest_s

    @property
    def now(self) -> bool:
        return not self._config.background_tokens and self._clock.now() < self._until

    def ends(self, requests: Iterable[PrefillRequest]) -> float | None:
        """When one of these that rests goes on, in seconds of the clock; None while none does."""
        resting = self.now and any(r.submit.background for r in requests if r.phase is PrefillPhase.RUNNING)
        return self._until if resting else None

    def computable(self, requests: Iterable[PrefillRequest]) -> bool:
        """Whether one of these that runs may be in a step now."""
        running = (r for r in requests if r.phase is PrefillPhase.RUNNING)
        return any(not (r.submit.background and self.now) for r in running)


class PrefillScheduler:
    """The admission and the batches of one prefill worker; see the module's prose. `granted` says whether decode has
    granted pages to a request."""

    def __init__(
        self,
        requests: RequestTable[PrefillRequest],
        pages: PrefillPages,
        granted: Callable[[PrefillRequest], bool],
        config: PrefillConfig,
        clock: Clock,
        cost: StepCost,
    ) -> None:
        self._requests, self._pages, self._granted = requests, pages, granted
        self._manager, self._page_tokens = pages.manager, pages.page_tokens
        self._config, self._clock, self._cost = config, clock, cost
        self._shares = FairShares(config.tenant_credit_tokens)
        self._returns = TenantReturns(config.tenant_return_s)
        self.rest = BackgroundRest(config, clock)
        self.counters = {"preemptions": 0.0, "prefetches_given_up": 0.0, "steps_kept_short": 0.0}

    @property
    def next_deadline(self) -> float | None:
        """When there is something to do for a request that isn't computed yet, in seconds of the clock."""
        due = self._pages.next_due(self._requests), self.rest.ends(self._requests)
        return min((at for at in due if at is not None), default=None)

    # ------------------------------------------------------------ admission

    def admit(self) -> None:
        """Give pages to waiting requests, as far as there are any, up to `prefill.max_running` requests in all."""
        waiting = [r for r in self._requests if r.phase is PrefillPhase.WAITING]
        running = [r for r in self._requests if r.phase is PrefillPhase.RUNNING]
        self._follow()
        ahead = _left(running)
        for request in self._in_turn(waiting, ahead):
            full = len(running) >= self._config.max_running
            if full and self.overserved(request, running) is None:
                return
            if self.waits(request, running):
                continue
            while full or not self._pages.take(request):
                if not self._make_way(request, running, waiting, for_pages=not full):
                    return
                running = [r for r in running if r.phase is PrefillPhase.RUNNING]
                full = len(running) >= self._config.max_running
                ahead.clear()
                ahead.update(_left(running))
            self.begin(request)
            running.append(request)
            ahead[request.submit.tenant] += len(request.tokens) - request.launched

    def _follow(self) -> None:
        """Tell the shares which tenants have prompts to compute."""
        todo = PrefillPhase.WAITING, PrefillPhase.RUNNING
        active = {r.submit.tenant: r.submit.weight for r in self._requests if r.phase in todo}
        self._shares.follow(active)
        self._returns.follow(active.keys(), self._clock.now())

    def _in_turn(self, waiting: Sequence[PrefillRequest], ahead: Counter[str]) -> Iterator[PrefillRequest]:
        """Yield waiting requests in the order of admission. `ahead`: tokens that admitted requests have left, by
        tenant; the caller counts up whom it admits."""
        classes: dict[tuple[bool, int], dict[str, list[PrefillRequest]]] = {}
        for request in waiting:
            queues = classes.setdefault((not self._entitled(request), -request.submit.priority), {})
            queues.setdefault(request.submit.tenant, []).append(request)
        for _, queues in sorted(classes.items(), key=lambda one: one[0]):
            yield from self._shares.in_turn(queues, ahead)

    def _make_way(
        self,
        request: PrefillRequest,
        running: Sequence[PrefillRequest],
        waiting: Sequence[PrefillRequest],
        *,
        for_pages: bool,
    ) -> bool:
        """Take its place, or `for_pages` pages, from whoever has to yield to `request`; False where nobody has to."""
        if for_pages and ((self._entitled(request) and self.preempt_youngest()) or self.give_up_prefetch(waiting)):
            return True
        victim = self.overserved(request, running)
        if victim is None:
            return False
        self._preempt(victim)
        return True

    def overserved(self, request: PrefillRequest, running: Sequence[PrefillRequest]) -> PrefillRequest | None:
        """Return the prompt of `running` that has to yield to `request`; None where none has to.

        A tenant with none there may take the place of one of no higher priority, the youngest, of the tenant that has
        most left there by its weight and keeps at least one. So places go from who has several to who has none, never
        back, and how often that happens is bounded by how many tenants there are. What yields finds its finished pages
        in the tree. A background prompt yields to every other that decode has granted.
        """
        resting = [one for one in running if one.submit.background and one.launched < len(one.tokens)]
        if resting and not request.submit.background and self._entitled(request):
            return resting[-1]
        several = Counter(one.submit.tenant for one in running)
        if several[request.submit.tenant] or not self._entitled(request):
            return None
        able = [
            one for one in running
            if several[one.submit.tenant] > 1 and one.submit.priority <= request.submit.priority
            and one.launched < len(one.tokens)
        ]  # fmt: skip
        if not able:
            return None
        left = _left(running)
        most = max(able, key=lambda one: left[one.submit.tenant] / one.submit.weight).submit.tenant
        return min((one for one in reversed(able) if one.submit.tenant == most), key=lambda one: one.submit.priority)

    def waits(self, request: PrefillRequest, running: Sequence[PrefillRequest]) -> bool:
        """Whether `request` waits for something else than pages: for what one of `running` computes, or for reads from
        storage. It holds up no other meanwhile."""
        if self._waits_for_another(request, running):
            return True
        return request.prefetch is not None and not self._manager.tiers.prefetcher.may_run(request.prefetch)

    def begin(self, request: PrefillRequest) -> None:
        """Take a request that has its pages into the next steps."""
        request.step(PrefillEvent.ADMIT)
        at_s = self._clock.now() - request.arrived
        request.marks.setdefault("queue", at_s)
        if request.held.loaded_bytes:
            cached = request.cached
            tiers = [
                f"{count} tokens of {tier}" for tier, count in (("host", cached.host), ("storage", cached.storage))
            ]
            request.notes.append(LegNote("loaded", at_s, request.held.loaded_bytes, ", ".join(tiers)))

    def preempt_youngest(self) -> bool:
        """Send the youngest request without a grant, of the lowest priority, back to waiting; False when there is
        none."""
        holders = [r for r in self._requests if r.allocation is not None and not self._entitled(r)]
        if not holders:
            return False
        victim = min(reversed(holders), key=lambda r: r.submit.priority)
        self._preempt(victim)
        return True

    def _preempt(self, victim: PrefillRequest) -> None:
        self._pages.preempt(victim)
        victim.notes.append(LegNote("preempted", self._clock.now() - victim.arrived))
        self.counters["preemptions"] += 1

    def give_up_prefetch(self, waiting: Sequence[PrefillRequest]) -> bool:
        """Let go of what was prefetched for the youngest of `waiting`, where nothing else will make room; False when
        there is nothing to let go of.

        Under `cache.write_policy: back`, pages of the device can't be evicted while the host is full and keeps pages
        below them: with nothing allocated and nothing being copied, prefetched pages are all that keeps them.
        """
        if len(self._manager.allocations) or self._manager.busy:
            return False
        holders = [r for r in waiting if r.phase is PrefillPhase.WAITING and r.prefetch is not None]
        if not holders:
            return False
        self._pages.release_prefetch(holders[-1])
        self.counters["prefetches_given_up"] += 1
        return True

    def _entitled(self, request: PrefillRequest) -> bool:
        """Whether the request comes first: decode holds memory for it, or prefill answers it alone."""
        return request.alone or self._granted(request)

    def _waits_for_another(self, request: PrefillRequest, running: Sequence[PrefillRequest]) -> bool:
        """Whether one of `running` is about to compute pages that `request` can have from the tree afterwards.

        `request` waits for the pages that both have in common and no longer. Until then the other one is as urgent as
        `request` is (`PrefillRequest.left`), so waiting takes no longer than computing the same pages beside it.
        """
        for other in running if self._pages.reuse else ():
            if other.submit.background and not request.submit.background:
                continue  # It would wait for what waits for its like.
            most = min(self._pages.reusable(request), len(other.prefix))
            # Keys are chained: pages are in common up to the first that differs.
            common = bisect_left(range(most), True, key=lambda page: request.chain[page] != other.chain[page])
            end = common * self._page_tokens
            if end > max(other.shared, other.held.depth * self._page_tokens):
                other.awaited = end if not other.awaited > other.launched else min(end, other.awaited)
                return True
        return False

    # ------------------------------------------------------------ the next step

    def next_batch(self, budget: int | None = None, *, beside: bool = False) -> list[ScheduledChunk]:
        """Divide the next step's token budget among the running requests; returns its chunks, the most urgent first.

        `budget`: tokens; None: `prefill.chunk_tokens`, as for every step that has nothing but chunks.
        Who has a higher priority comes first. Tenants of one priority have fair shares of what is left, a page at a
        time; `_plan_in_turn` says how a tenant's part is shared. Chunks end at page boundaries, except at the end of
        the prompt, where the whole budget is less than a page, and at a picture whose positions see each other. Such a
        picture waits for a step that has room for it; one that has nothing else is as long as the picture. A chunk ends
        before a picture that isn't computed yet (`PrefillPages.compute_pictures`), and none begins there. What is
        planned is launched, and charged. While another tenant is expected the step has less (`_kept_short`).

        Where a step has others in it, background prompts have `prefill.background_tokens` of what these leave.
        `beside`: it has rows of others. After others they rest (`prefill.background_rest_s`): the answers that others'
        prompts go on in often share their processor. By themselves they have short steps: whoever comes waits for the
        one under way.
        """
        able = launchable(self._requests)
        self._follow()
        whole = left = self._kept_short(able, self._config.chunk_tokens if budget is None else budget)
        if beside or any(not request.submit.background for request in able):
            self.rest.begin()
            beside = True
        beside = beside or self.rest.now
        for background, those in groupby(able, key=lambda r: r.submit.background):
            if background and beside:
                left = min(left, self._config.background_tokens)
            for priority, equals in groupby(those, key=lambda r: r.submit.priority):
                left -= self._plan_fairly(list(equals), left, whole, short=priority == able[0].submit.priority)
        planned = [(request, request.planned - request.launched) for request in able]
        for request, count in planned:
            self._shares.charge(request.submit.tenant, request.submit.weight, count)
        return [ScheduledChunk(request, self._row(request, count)) for request, count in planned if count]

    def _kept_short(self, able: Sequence[PrefillRequest], budget: int) -> int:
        """Return what of a step's budget it may use: all of it, or while a tenant is expected as many tokens of the
        oldest prompt as add `prefill.shared_step_s` to the step, or those that tenants had saved up, if they are
        more. Where all prompts are background ones, somebody is always expected."""
        alone = bool(able) and able[0].submit.background
        if not able or not (alone or self._returns.expected(self._clock.now())):
            return budget
        tokens = self._cost.tokens_within(self._config.shared_step_s, able[0].launched)
        if tokens is None or tokens >= budget:
            return budget
        wanted = Counter[str]()
        for request in able:
            wanted[request.submit.tenant] += len(request.tokens) - request.launched
        saved = 0 if alone else sum(min(count, self._shares.credit(tenant)) for tenant, count in wanted.items())
        short = min(budget, max(int(tokens), budget // _MIN_SHARED, self._page_tokens, saved))
        self.counters["steps_kept_short"] += short < budget
        return short

    def _plan_fairly(self, equals: Sequence[PrefillRequest], budget: int, whole: int, *, short: bool) -> int:
        """Plan up to `budget` tokens of requests of one priority; returns how many. `whole`: the step's budget;
        `short`: short ones have a part of it."""
        of: dict[str, list[PrefillRequest]] = {}
        for request in equals:
            of.setdefault(request.submit.tenant, []).append(request)
        if len(of) == 1:
            return self._plan_in_turn(equals, budget, whole, short=short)
        left, spent = budget, Counter[str]()
        if budget >= 2 * self._page_tokens:
            wanted = {tenant: sum(len(r.tokens) - r.launched for r in those) for tenant, those in of.items()}
            for tenant, part in self._shares.divide(budget, wanted, self._page_tokens).items():
                spent[tenant] = self._plan_in_turn(of[tenant], part, whole, short=short)
                left -= spent[tenant]
        # What a part was too small for, or its tenant could not use.
        for tenant in sorted(of, key=lambda tenant: self._shares.counter(tenant, spent[tenant])):
            left -= self._plan_in_turn(of[tenant], left, whole, short=False)
        return budget - left

    def _plan_in_turn(self, able: Sequence[PrefillRequest], budget: int, whole: int, *, short: bool) -> int:
        """Plan up to `budget` tokens of one tenant's requests; returns how many.

        With `short`, a part of the budget (`prefill.short_share`) goes first to requests with less left to compute than
        the oldest, the least first, so that a short prompt doesn't wait for a long one. The rest goes to all in order
        of arrival: that oldest one always has the other part, and every request that waits becomes the oldest in time.
        """
        size, left = self._page_tokens, budget
        if short:
            first = max(size, int(budget * self._config.short_share)) if budget >= 2 * size else 0
            if (least := able[0].at_once) > 1:
                first = min(first, budget - least)
            for request in sorted((r for r in able[1:] if r.left < able[0].left), key=lambda r: r.left):
                first -= (count := self._plan(request, min(first, left), whole))
                left -= count
        for request in able:
            left -= self._plan(request, left, whole)
        return budget - left

    def _plan(self, request: PrefillRequest, most: int, budget: int) -> int:
        """Plan up to `most` more positions of the request for this step, whose budget is `budget`; returns how many."""
        size, planned = self._page_tokens, request.planned
        if request.at_once > most and most < budget:
            return 0
        # Recurrent states are kept as they are at the last page boundary: a chunk ends there.
        boundary = request.last_boundary(size) if self._manager.running.stateful else 0
        whole = boundary if request.launched < boundary else len(request.tokens)
        if (lacking := self._pages.lacking(request)) is not None:
            whole = min(whole, max(lacking.at[0], request.launched))
        if self._manager.running.stateful and request.awaited > request.launched:
            whole = min(whole, request.awaited)  # Requests that wait for it go on from the state there.
        end = min(whole, planned + most)
        if end < whole and end // size * size > planned:
            end = end // size * size
        elif end < whole and most < budget:
            return 0  # Less than a page is left to a step with the whole budget for it.
        if request.allocation is None or end <= planned:
            return 0
        before, behind = request.whole_until(end, planned)
        reached = self._manager.running.extend(request.allocation, before if before > planned else behind)
        request.planned = max(planned, request.whole_until(reached, planned)[0])
        return request.planned - planned

    def _row(self, request: PrefillRequest, count: int) -> BatchRow:
        start, end = request.launched, request.launched + count
        tokens, sampling = request.inputs, request.submit.sampling
        draw = None
        if end == len(tokens) and request.wants_draw:
            mask = TokenMask.allowed(sampling.allowed_token_ids)
            draw = TokenDraw(sampling, tokens, request.submit.prompt_len, mask=mask)
            if request.grammar is not None:
                draw = draw.masked(request.grammar.first)
        follow = tokens[start + 1 : end + 1] if request.wants_scores else ()
        tables = self._manager.running.block_tables(request.held, start, end)
        top = sampling.prompt_logprobs or 0
        return BatchRow(
            tokens[start:end],
            start,
            tables,
            draw,
            follow or None,
            top,
            pictures=request.pictured(start, end) if request.pictures else (),
            adapter=sampling.adapter,
            pooling=request.pooling,
            turned=request.turned,
            routed=sampling.routed_experts,
        )


def _left(running: Sequence[PrefillRequest]) -> Counter[str]:
    """Tokens that admitted requests have left to compute, by tenant."""
    left = Counter[str]()
    for request in running:
        left[request.submit.tenant] += len(request.tokens) - request.launched
    return left
