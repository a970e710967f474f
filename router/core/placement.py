"""The router's scheduler: which prefill and which decode worker a request goes to, and what each has in flight.

A worker can be chosen when it is ready and linked, has room for the whole sequence, is admitted by its circuit breaker
and isn't avoided by this request. Both workers of a pair must be of one hand-over class, and an answer that has begun
goes on in its numerics class. A request with an adapter goes to builds that know adapters alone, and first to workers
that have its adapter in memory. A decode worker to which the chosen prefill worker has failed to hand this request over
is left out while there is another. Among the rest the policy decides (`router/core/routing_policies.py`).

A colocated worker has both roles, and a request goes to one such worker alone, as prefill is chosen; each sequence that
it runs counts as `SEQUENCE_TOKENS`. Where decode workers can compute prompts (`disaggregation.mode`), a request goes to
one of them alone if there is no pair for it, or if it is expected to begin earlier so (`LocalPrefill`).

A pair that was picked is booked by the caller until it is unbooked, and `check` recounts the books from the requests.

**Choices are explained** for a request's record (`explained`): the workers that could have been chosen, at which cost,
and those that could not, with the reason. It is made of the values of the choice, before the request is booked. The
best few workers are named with what the policy compares, and of those that could not be chosen only the first few of
each reason: a choice among a thousand workers is explained in a few lines, and costs the router little.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.messages.request_record import (
    MAX_CANDIDATES,
    MAX_NAMED,
    PlacementChoice,
    RefusedWorkers,
    WorkerCandidate,
)
from twinpool.contracts.messages.stream_frames import (
    ADAPTERS_SINCE,
    EMBEDDINGS_SINCE,
    JUDGED_SINCE,
    PICTURES_SINCE,
    PLACES_SINCE,
    POOLINGS_SINCE,
    ROUTED_SINCE,
)
from twinpool.contracts.sampling_params import JUDGED
from twinpool.router.core.routing_policies import LocalPrefill, LocalReason, RoutingAsk, RoutingPolicy
from twinpool.router.kv_indexer.prefix_indexes import PrefixIndexes, PromptHits
from twinpool.router.state.able_workers import AbleWorkers
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.state.ttft_prediction import TtftPrediction
from twinpool.router.state.worker_table import GONE, WorkerEntry, WorkerKey, WorkerTable


@dataclass(frozen=True, slots=True)
class Considered:
    """What one worker was chosen from."""

    role: Role
    able: AbleWorkers
    chosen: WorkerEntry
    ask: RoutingAsk
    peer: WorkerEntry | None = None
    """The prefill worker that is to hand the request over, of a choice among decode workers."""
    why: str = ""
    """Why it was chosen, where the policy's cost isn't the reason."""


def explained(seen: Considered, r: RoutedRequest, policy: RoutingPolicy) -> PlacementChoice:
    """The choice in words and numbers."""
    able, ask = seen.able, seen.ask
    prompts = seen.role is not Role.DECODE
    costs = np.asarray((policy.prefill_cost if prompts else policy.decode_cost)(able, ask), np.float64)
    best = np.argsort(costs, kind="stable")[:MAX_CANDIDATES]
    some = AbleWorkers(able.columns, able.at.take(best))
    loads, held = some.column("whole_load"), (ask.hits.held_of if prompts else ask.hits.device_of)(some)
    named = [
        WorkerCandidate(entry.record.name, round(cost, 3), here, load)
        for entry, cost, here, load in zip(some, costs.take(best).tolist(), held.tolist(), loads.tolist(), strict=True)
    ]
    return PlacementChoice(
        0.0,
        r.attempt,
        seen.role,
        seen.chosen.record.name,
        policy.prefill_unit if prompts else policy.decode_unit,
        tuple(named),
        len(able) - len(named),
        _refused(seen, r),
        seen.why,
    )


def _refused(seen: Considered, r: RoutedRequest) -> tuple[RefusedWorkers, ...]:
    """The workers of the role that could not be chosen, by reason."""
    able, columns = seen.able, seen.able.columns
    if len(able) == columns.count(seen.role):
        return ()
    found: dict[str, list[WorkerEntry]] = defaultdict(list)
    reasons = columns.refusals(seen.role, seen.ask.max_len, seen.ask.now)
    told = {at for places in reasons.values() for at in places} | set(able.at.tolist())
    for reason, places in reasons.items():
        found[reason] += [columns.entries[at] for at in places]
    for at, entry in enumerate(columns.entries):
        if entry.record.role is seen.role and at not in told:
            found[_left_out(entry, seen, r)].append(entry)
    return tuple(
        RefusedWorkers(reason, len(some), tuple(entry.record.name for entry in some[:MAX_NAMED]))
        for reason, some in found.items()
        if some
    )


def _left_out(entry: WorkerEntry, seen: Considered, r: RoutedRequest) -> str:
    """Why a worker that could take requests was left out of this choice."""
    version, what = needed_of(r)
    if not entry.speaks(version):
        return f"its build knows no {what}"
    if r.avoid.get(entry.key, 0.0) > seen.ask.now:
        return "avoided after it failed this request"
    if seen.peer is not None and (seen.peer.key, entry.key) in r.spoiled:
        return f"a hand-over from {seen.peer.record.name} to it has failed"
    if not r.goes_on_with(entry.numerics, entry.record.weights_number):
        return "of another numerics class, or of other weights, than those with which the answer began"
    if seen.peer is not None and entry.handover != seen.peer.handover:
        return f"{seen.peer.record.name} can't hand over to it: another hand-over class"
    if seen.role is Role.PREFILL:
        return "no decode worker that could take the request is of its hand-over class"
    return "it has no room for more prompts"


LOAD_OF_LOADING = {Role.PREFILL: 2048, Role.COLOCATED: 2048, Role.DECODE: 4}
"""How much more, in the unit of its load, a worker that has a request's adapter in memory may have in flight than the
others before one of them gets it, and reads the adapter's files first."""


def needed_of(r: RoutedRequest) -> tuple[int, str]:
    """The version of streams since which workers know all that a request asks for, and what came with it; 0: all do."""
    needed = [(PICTURES_SINCE, "images") if r.pictures else (0, "")]
    if any(picture.across or picture.whole for picture in r.pictures):
        needed.append((PLACES_SINCE, "images of this model"))
    if r.sampling.adapter is not None:
        needed.append((ADAPTERS_SINCE, "adapters"))
    if r.sampling.pooling:
        known = {"last": (EMBEDDINGS_SINCE, "embeddings"), JUDGED: (JUDGED_SINCE, "rerankers")}
        needed.append(known.get(r.sampling.pooling, (POOLINGS_SINCE, f"this model's pooling, {r.sampling.pooling}")))
    if r.sampling.routed_experts:
        needed.append((ROUTED_SINCE, "return_routed_experts"))
    return max(needed)


def holding_adapter(r: RoutedRequest, able: AbleWorkers) -> AbleWorkers:
    """Those that have the request's adapter in memory, where one of them has little more in flight than all others;
    else all."""
    adapter = r.sampling.adapter
    if adapter is None or not able:
        return able
    holding = able.where(lambda e: adapter.digest in e.status.adapters)
    if not holding:
        return able
    slack = LOAD_OF_LOADING[next(iter(able)).record.role]
    least, mine = (int(some.column("whole_load").min()) for some in (able, holding))
    return holding if mine <= least + slack else able


@dataclass(frozen=True, slots=True)
class WorkerPair:
    """The prefill and the decode worker of one attempt; the same one where that is colocated, or computes the prompt of
    a request that it decodes."""

    prefill: WorkerEntry
    decode: WorkerEntry | None
    """None where only one token is left to draw: prefill draws it."""
    local: LocalReason | None = None
    """Why a decode worker computes the prompt; None where it doesn't."""
    considered: tuple[Considered, ...] = field(default=(), compare=False)
    """What each of them was chosen from."""

    @property
    def one(self) -> bool:
        """Whether one worker does both."""
        return self.decode is self.prefill


@dataclass(frozen=True, slots=True)
class PredictedTtft:
    """The predicted time to first token of a request on the worker that would be quickest, for which it is a prompt of
    `tokens`."""

    prediction: TtftPrediction
    tokens: int
    worker: WorkerEntry


class Placement:
    """Picks and books the workers of requests. Times are seconds of the router core's clock."""

    def __init__(
        self,
        workers: WorkerTable,
        indexes: PrefixIndexes,
        policy: RoutingPolicy,
        local: LocalPrefill | None = None,
    ) -> None:
        """`local`: None where decode workers compute no prompts."""
        self._local = local
        self._workers, self._indexes, self._policy = workers, indexes, policy
        self._turn = 0
        """The number of the latest choice."""

    # ------------------------------------------------------------ pick

    def pick(self, r: RoutedRequest, now: float) -> WorkerPair | None:
        """The pair of workers for a request's next attempt; None while there is none."""
        if self._workers.colocated:
            seen = self._pick_prefill(Role.COLOCATED, r, now, None)
            pair = WorkerPair(seen.chosen, seen.chosen, considered=(seen,)) if seen is not None else None
        else:
            pair = self._pick_pair(r, now)
            if self._local is not None and not r.sampling.pooling:
                pair = self._pick_local(r, pair, self._local, now) or pair
        for entry in (pair.prefill, pair.decode) if pair is not None else ():
            if entry is not None:
                self._chosen(entry)
        return pair

    def _pick_pair(self, r: RoutedRequest, now: float) -> WorkerPair | None:
        """A prefill worker, and the decode worker to which it hands the request over."""
        to_decode = r.max_len - r.next_position > 1
        classes = decoders = None
        if to_decode:
            # The request can only go on where a decode worker is of the same hand-over class.
            decoders = self._able(Role.DECODE, r, r.avoid, now, None)
            if not decoders:
                return None  # before the indexes are asked: many requests may wait
            classes = decoders.classes()
        seen = self._pick_prefill(Role.PREFILL, r, now, classes)
        if seen is None:
            return None
        prefill = seen.chosen
        if decoders is None:
            return WorkerPair(prefill, None, considered=(seen,))
        spoiled = {decode for other, decode in r.spoiled if other == prefill.key}
        hits = self._indexes.hits(r.hashes, now)
        able = decoders.of_class({prefill.handover})
        if spoiled:
            able = able.where(lambda e: e.key not in spoiled) or able
        if not able:
            return None
        able, ask = holding_adapter(r, able), self._ask(r, hits, now)
        decode = self._policy.decode(able, ask)
        return WorkerPair(prefill, decode, considered=(seen, Considered(Role.DECODE, able, decode, ask, peer=prefill)))

    def _pick_local(
        self, r: RoutedRequest, pair: WorkerPair | None, local: LocalPrefill, now: float
    ) -> WorkerPair | None:
        """A decode worker that computes the prompt itself, where that is better than `pair`, or there is no pair; else
        None."""
        able = self._in_class(r, self._able(Role.DECODE, r, r.avoid, now, None))
        if not able:
            return None
        reason = LocalReason.EARLIER
        if pair is None:
            reason = LocalReason.NO_PREFILL
        elif pair.decode is not None and (pair.prefill.key, pair.decode.key) in r.spoiled:
            reason = LocalReason.HANDOVER_FAILED
        hits, why = self._indexes.hits(r.hashes, now), str(reason)
        if reason is LocalReason.EARLIER:
            able = able.where(lambda e: local.has_room(e, r.next_position - hits.held.get(e.key, 0)))
            if not able:
                return None
        ask = self._ask(r, hits, now)
        decode = self._policy.local(able, ask)
        if reason is LocalReason.EARLIER and pair is not None:
            here = local.local_s(r, decode, self._uncached(r, decode, now), pair.prefill, now)
            lacking = r.next_position - (hits.device.get(pair.decode.key, 0) if pair.decode is not None else 0)
            there = local.handover_s(r, pair.prefill, self._uncached(r, pair.prefill, now), pair.decode, lacking, now)
            if here is None or there is None or here >= there:
                return None
            why = f"its first token is expected after {here:.3f} s, by a hand-over after {there:.3f} s"
        return WorkerPair(decode, decode, reason, (Considered(Role.DECODE, able, decode, ask, why=why),))

    def explain(self, r: RoutedRequest, pair: WorkerPair) -> list[PlacementChoice]:
        """Who could have been chosen instead, of a pair that was picked and isn't booked yet."""
        return [explained(seen, r, self._policy) for seen in pair.considered]

    def _pick_prefill(
        self, role: Role, r: RoutedRequest, now: float, classes: Container[str] | None
    ) -> Considered | None:
        able = self._in_class(r, self._able(role, r, r.avoid, now, classes))
        if not able:
            return None
        able = holding_adapter(r, able)
        ask = self._ask(r, self._indexes.hits(r.hashes, now), now)
        return Considered(role, able, self._policy.prefill(able, ask), ask)

    @staticmethod
    def _in_class(r: RoutedRequest, able: AbleWorkers) -> AbleWorkers:
        """Those in whose numerics class, and with whose weights, the answer can go on."""
        return able if r.free else able.where(lambda e: r.goes_on_with(e.numerics, e.record.weights_number))

    def pick_decode(
        self, r: RoutedRequest, avoid: Mapping[WorkerKey, float], now: float, classes: Container[str]
    ) -> WorkerEntry | None:
        """A worker of one of these hand-over classes that a running request can migrate to; None while there is none.
        `avoid`: workers not to choose, each with the time until when."""
        role = Role.COLOCATED if self._workers.colocated else Role.DECODE
        able = holding_adapter(r, self._able(role, r, avoid, now, classes))
        return self._chosen(self._policy.decode(able, self._ask(r, PromptHits(), now))) if able else None

    def _able(
        self,
        role: Role,
        r: RoutedRequest,
        avoid: Mapping[WorkerKey, float],
        now: float,
        classes: Container[str] | None,
    ) -> AbleWorkers:
        able = self._workers.able(role, r.max_len, avoid, now)
        version, _ = needed_of(r)
        if version:
            able = able.where(lambda e: e.speaks(version))
        return able.of_class(classes) if classes is not None else able

    def _chosen(self, entry: WorkerEntry) -> WorkerEntry:
        self._turn += 1
        entry.turn = self._turn
        return entry

    def _ask(self, r: RoutedRequest, hits: PromptHits, now: float) -> RoutingAsk:
        return RoutingAsk(r.next_position, r.max_len, hits, r.session_key, now)

    def _uncached(self, r: RoutedRequest, prefill: WorkerEntry, now: float) -> int:
        """Tokens of the request that this worker would have to compute."""
        return r.next_position - self._indexes.hits(r.hashes, now).held.get(prefill.key, 0)

    def predict_ttft(self, requests: Sequence[RoutedRequest], now: float) -> PredictedTtft | None:
        """The time to first token of new requests that come together, were they placed now: that of the longest prompt,
        or of their share where they are many. Choices of one prompt are computed once. None where no worker can take
        them, or too little was seen of those that can."""
        prompts = {r.prompt: r for r in requests}.values()
        role = Role.COLOCATED if self._workers.colocated else Role.PREFILL
        need = max(r.max_len for r in requests)
        able = self._workers.able(role, need, {}, now)
        found = self._predicted(requests[0], prompts, able, now)
        if len(found) < len(able):
            return None
        if self._local is not None and not self._workers.colocated and not requests[0].sampling.pooling:
            local, there = self._local, bool(able)
            able = self._workers.able(Role.DECODE, need, {}, now)
            here = self._predicted(requests[0], prompts, able, now)
            if there:  # Then they are given only what is measured, and has room.
                here = [p for p in here if p.worker.prompts.measured(p.tokens, now)]
                here = [p for p in here if local.has_room(p.worker, p.tokens)]
            elif len(here) < len(able):
                return None
            found += here
        return min(found, key=lambda one: one.prediction.seconds, default=None)

    def _predicted(
        self, first: RoutedRequest, prompts: Collection[RoutedRequest], able: AbleWorkers, now: float
    ) -> list[PredictedTtft]:
        """The predictions of those workers of which enough was seen."""
        found: list[PredictedTtft] = []
        uncached = [(r.next_position - self._indexes.hits(r.hashes, now).held_of(able)).tolist() for r in prompts]
        for entry, *sizes in zip(able, *uncached, strict=True):
            tokens = max(*sizes, sum(sizes) // len(able))
            predicted = entry.prompts.predict(tokens, first.priority, now, first.share)
            if predicted is not None:
                found.append(PredictedTtft(predicted, tokens, entry))
        return found

    def missing(self, r: RoutedRequest, now: float) -> str:
        """Why a queued request has no workers, in words for its error message."""
        prefill = Role.COLOCATED if self._workers.colocated else Role.PREFILL
        version, what = needed_of(r)
        if (there := self._workers.serving(prefill, now)) and not any(entry.speaks(version) for entry in there):
            return f"no {prefill} worker whose build knows {what}"
        roles = [role for role in self._workers.needed if not self._workers.serving(role, now)]
        if not roles and (unlike := self._workers.unlike(now)):
            return unlike
        free = "free pair of workers" if len(self._workers.needed) > 1 else "free worker"
        what = " and no ".join(f"{role} worker" for role in roles) or free
        if left_alone := self._workers.left_alone(now):
            what += f" (left alone after failures: {', '.join(left_alone)})"
        if r.bound:
            what += f" of the numerics class and weights {r.bound}, in which its answer began,"
        return f"no {what} could serve the request"

    def hopeless(self, r: RoutedRequest, now: float, wait_s: float) -> str:
        """Why a queued request is to wait for workers no longer: it has for `wait_s`, and it isn't that workers change
        their weights; the weights with which its answer began are no worker's any more; or nobody is awake. Empty where
        it may wait."""
        served = self._workers.served
        alive = [entry for entry in self._workers if entry.status.state not in GONE]
        if served.asleep and not served.by_demand and not alive:
            return "the cluster sleeps, and takes requests once it was woken"
        number = max(one.drawn_again_with or one.weights_number for one in r.siblings or (r,))
        fit = any(r.goes_on_with(entry.numerics, entry.record.weights_number) for entry in alive)
        if r.free or number >= served.weights.number or fit:
            waited = now - r.waiting_since >= wait_s and not served.behind
            return f"{self.missing(r, now)} within {wait_s:g} s" if waited else ""
        return "the weights were changed while it was answered, and no worker has those any more: ask again"

    # ------------------------------------------------------------ book, unbook

    def book(self, r: RoutedRequest, pair: WorkerPair, now: float) -> None:
        """Book the request on this pair, and note its blocks as sent to both."""
        prefill, decode = pair.prefill, pair.decode
        r.prefill, r.prefill_loaded = prefill.key, self._uncached(r, prefill, now)
        r.local = str(pair.local or "")
        r.workers = {Role.PREFILL: prefill.record.name}
        growth = 0
        if decode is not None:
            r.decode = decode.key
            r.workers[Role.DECODE] = decode.record.name
            growth = r.max_len - self._indexes.hits(r.hashes, now).device.get(decode.key, 0)
        if decode is not None and pair.one:
            growth = growth if pair.local else 0
            decode.book(r.id, decode.sequence_load, growth, r.prefill_loaded)
        else:
            prefill.book(r.id, 0, prompt=r.prefill_loaded)
            if decode is not None:
                decode.book(r.id, decode.sequence_load, growth)
        prefill.prompts.add(r.id, r.prefill_loaded, r.priority, now, r.share)
        self._indexes.sent(prefill.key, r.hashes, now)
        if decode is not None and not pair.one:
            self._indexes.sent(decode.key, r.hashes, now)

    def transferred(self, r: RoutedRequest, held: int, exposed_s: float) -> None:
        """Note that a prompt has arrived at the decode worker, which held a part of it, and how many seconds of that
        came after its computation."""
        entry = self._workers.get(r.decode) if r.decode else None
        if entry is not None and not r.on_one_worker:
            entry.transfers.saw(max(0, r.base - held), exposed_s)

    def computed(self, r: RoutedRequest, now: float) -> None:
        """Note that prefill has computed the prompt, which may not have left it yet. Idempotent."""
        entry = self._workers.get(r.prefill) if r.prefill else None
        if entry is not None:
            entry.prompts.computed(r.id, now)
            entry.touch()
            if r.expected is not None and not r.attempt:
                entry.prompts.came(r.expected, now - r.arrived)
        r.expected = None

    def prefilled(self, r: RoutedRequest, now: float) -> None:
        """Unbook the prompt's tokens, which prefill has computed; the request stays booked. Idempotent."""
        self.computed(r, now)
        entry = self._workers.get(r.prefill) if r.prefill else None
        if entry is not None:
            entry.prompt_done(r.prefill_loaded)
        r.prefill_loaded = 0

    def unbook_prefill(self, r: RoutedRequest, now: float) -> None:
        """Unbook the request from its prefill worker, unless that is its decode worker, too. Idempotent."""
        entry = self._workers.get(r.prefill) if r.prefill else None
        if entry is not None:
            entry.unbook(r.id, 0, r.prefill_loaded)
            entry.prompts.remove(r.id, now)
        r.prefill, r.prefill_loaded = None, 0

    def unbook(self, r: RoutedRequest, now: float) -> None:
        """Unbook the request from both of its workers. Idempotent."""
        self.unbook_prefill(r, now)
        entry = self._workers.get(r.decode) if r.decode else None
        if entry is not None:
            entry.unbook(r.id, entry.sequence_load)
        r.decode = None

    def check(self, requests: Iterable[tuple[RoutedRequest, WorkerKey | None]]) -> list[str]:
        """Recount the books from all requests, each with the worker that it migrates to, if any; returns a line for
        each disagreement."""
        found = []
        load: Counter[WorkerKey] = Counter()
        local: Counter[WorkerKey] = Counter()
        members: dict[WorkerKey, set[RequestId]] = {}
        for r, target in requests:
            for key, prompt in ((r.prefill, r.prefill_loaded), (r.decode, None), (target, None)):
                if key is not None:
                    known = self._workers.get(key)
                    sequence = known.sequence_load if known is not None else 1
                    computes = known is not None and known.record.role is Role.DECODE and prompt is not None
                    (local if computes else load)[key] += sequence if prompt is None else prompt
                    members.setdefault(key, set()).add(r.id)
        for entry in self._workers:
            if entry.breaker.probe is not None and entry.breaker.probe not in entry.requests:
                found.append(f"{entry.record.name}: its breaker waits for a request that it doesn't have")
            want = load[entry.key]
            if entry.local_tokens != local[entry.key]:
                wanted = local[entry.key]
                found.append(f"{entry.record.name}: {entry.local_tokens} local tokens booked, requests have {wanted}")
            if not set(entry.prompts) <= entry.requests:
                found.append(f"{entry.record.name}: prompts wait there whose requests aren't booked")
            if entry.load != want:
                found.append(f"{entry.record.name}: load is booked as {entry.load}, requests add up to {want}")
            if entry.requests != members.pop(entry.key, set()):
                found.append(f"{entry.record.name}: booked requests differ from the requests that name it")
        return found + [f"requests name {name} #{inc}, which is not in the table" for name, inc in members]
