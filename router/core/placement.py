"""The router's scheduler: which prefill and which decode worker a request goes to, and what each has in flight.

A worker can be chosen when it is ready and linked, has room for the whole sequence, is admitted by its circuit breaker
and isn't avoided by this request. Both workers of a pair must be of the same numerics class. Among such workers one
expression a role decides:

- Prefill is routed by KV cache: to the worker with the fewest tokens to compute before the request's first token, which
  are its prompt tokens in flight and the tokens of this prompt that it doesn't hold, as far as the indexes know.
- Decode is routed by load: to the worker with the fewest sequences. A worker to which the chosen prefill worker has
  failed to hand this request over comes last.

A colocated worker has both roles, and a request goes to one such worker alone: to the one with the fewest tokens to
compute, where each sequence that it runs counts as `SEQUENCE_TOKENS`.

Ties go to the worker that was chosen longest ago. A pair that was picked is booked by the caller until it is unbooked,
and `check` recounts the books from the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from contracts.ids import RequestId, Role
from router.kv_indexer.worker_indexes import WorkerIndexes
from router.state.prefill_queue import TtftPrediction
from router.state.routed_request import RoutedRequest
from router.state.worker_table import WorkerEntry, WorkerKey, WorkerTable


@dataclass(frozen=True, slots=True)
class WorkerPair:
    """The prefill and the decode worker of one attempt; the same one where that is colocated."""

    prefill: WorkerEntry
    decode: WorkerEntry | None
    """None where only one token is left to draw: prefill draws it."""

    @property
    def one(self) -> bool:
        """Whether one worker has both roles."""
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

    def __init__(self, workers: WorkerTable, indexes: WorkerIndexes) -> None:
        self._workers, self._indexes = workers, indexes
        self._turn = 0
        """The number of the latest choice."""

    # ------------------------------------------------------------ pick

    def pick(self, r: RoutedRequest, now: float) -> WorkerPair | None:
        """The pair of workers for a request's next attempt; None while there is none."""
        if self._workers.colocated:
            both = self._pick_by_tokens(Role.COLOCATED, r, now, {r.numerics} if r.told else None)
            return WorkerPair(both, both) if both is not None else None
        to_decode = r.max_len - r.next_position > 1
        classes = {r.numerics} if r.told else None
        if to_decode:
            # The request can only go on where a decode worker is of the same numerics class.
            there = self._workers.classes(Role.DECODE, r.max_len, r.avoid, now)
            classes = there if classes is None else classes & there
            if not classes:
                return None  # before the indexes are asked: many requests may wait
        prefill = self.pick_prefill(r, now, classes)
        if prefill is None:
            return None
        if not to_decode:
            return WorkerPair(prefill, None)
        spoiled = {decode for other, decode in r.spoiled if other == prefill.key}
        decode = self.pick_decode(r.max_len, r.avoid, now, {prefill.numerics}, spoiled)
        return WorkerPair(prefill, decode) if decode is not None else None

    def pick_prefill(self, r: RoutedRequest, now: float, classes: Container[str] | None = None) -> WorkerEntry | None:
        """A prefill worker for a request; None while there is none.

        `classes`: the numerics classes to choose from; None: all.
        """
        return self._pick_by_tokens(Role.PREFILL, r, now, classes)

    def _pick_by_tokens(
        self, role: Role, r: RoutedRequest, now: float, classes: Container[str] | None
    ) -> WorkerEntry | None:
        def cost(e: WorkerEntry) -> tuple[int, int, int]:
            uncached = self._uncached(r, e)
            return (e.load + uncached, uncached, e.turn)

        return self._pick(role, r.max_len, r.avoid, now, cost, classes)

    def pick_decode(
        self,
        max_len: int,
        avoid: Mapping[WorkerKey, float],
        now: float,
        classes: Container[str],
        spoiled: Container[WorkerKey] = (),
    ) -> WorkerEntry | None:
        """A decode worker for a sequence of `max_len` positions, of one of these numerics classes; None while there is
        none. `avoid`: workers not to choose, each with the time until when; `spoiled`: workers to choose last."""
        role = Role.COLOCATED if self._workers.colocated else Role.DECODE
        return self._pick(role, max_len, avoid, now, lambda e: (e.key in spoiled, e.load, e.turn), classes)

    def _pick(
        self,
        role: Role,
        need: int,
        avoid: Mapping[WorkerKey, float],
        now: float,
        cost: Callable[[WorkerEntry], tuple[int, ...]],
        classes: Container[str] | None,
    ) -> WorkerEntry | None:
        able = [e for e in self._workers.able(role, need, avoid, now) if classes is None or e.numerics in classes]
        if not able:
            return None
        entry = min(able, key=cost)
        self._turn += 1
        entry.turn = self._turn
        return entry

    def _uncached(self, r: RoutedRequest, prefill: WorkerEntry) -> int:
        """Tokens of the request that this worker would have to compute."""
        return r.next_position - self._indexes.overlap(prefill.key, r.hashes) * self._indexes.page_tokens

    def predict_ttft(self, requests: Sequence[RoutedRequest], now: float) -> PredictedTtft | None:
        """The time to first token of new requests that come together, were they placed now: that of the longest prompt,
        or of their share where they are many. Choices of one prompt are computed once. None where no worker can take
        them, or too little was seen of those that can."""
        prompts = {r.prompt: r for r in requests}.values()
        role = Role.COLOCATED if self._workers.colocated else Role.PREFILL
        able = self._workers.able(role, max(r.max_len for r in requests), {}, now)
        found: list[PredictedTtft] = []
        for entry in able:
            sizes = [self._uncached(r, entry) for r in prompts]
            tokens = max(*sizes, sum(sizes) // len(able))
            predicted = entry.prompts.predict(tokens, requests[0].priority, now, requests[0].share)
            if predicted is not None:
                found.append(PredictedTtft(predicted, tokens, entry))
        return min(found, key=lambda one: one.prediction.seconds) if len(found) == len(able) and found else None

    def missing(self, r: RoutedRequest, now: float) -> str:
        """Why a queued request has no workers, in words for its error message."""
        roles = [role for role in self._workers.roles if not self._workers.serving(role, now)]
        if not roles and (unlike := self._workers.unlike(now)):
            return unlike
        free = "free worker" if self._workers.colocated else "free pair of workers"
        what = " and no ".join(f"{role} worker" for role in roles) or free
        if left_alone := self._workers.left_alone(now):
            what += f" (left alone after failures: {', '.join(left_alone)})"
        if r.told and r.numerics:
            what += f" of the numerics class {r.numerics}, in which its answer began,"
        return f"no {what} could serve the request"

    # ------------------------------------------------------------ book, unbook

    def book(self, r: RoutedRequest, pair: WorkerPair, now: float) -> None:
        """Book the request on this pair, and note its blocks as sent to the prefill worker."""
        prefill, decode = pair.prefill, pair.decode
        r.prefill, r.prefill_loaded = prefill.key, self._uncached(r, prefill)
        r.workers = {Role.PREFILL: prefill.record.name}
        prefill.book(r.id, r.prefill_loaded + (decode.sequence_load if decode is not None and pair.one else 0))
        prefill.prompts.add(r.id, r.prefill_loaded, r.priority, now, r.share)
        self._indexes.sent(prefill.key, r.hashes)
        if decode is not None:
            r.decode = decode.key
            r.workers[Role.DECODE] = decode.record.name
            if not pair.one:
                decode.book(r.id, decode.sequence_load)

    def computed(self, r: RoutedRequest, now: float) -> None:
        """Note that prefill has computed the prompt, which may not have left it yet. Idempotent."""
        entry = self._workers.get(r.prefill) if r.prefill else None
        if entry is not None:
            entry.prompts.computed(r.id, now)
            if r.expected is not None and not r.attempt:
                entry.prompts.came(r.expected, now - r.arrived)
        r.expected = None

    def prefilled(self, r: RoutedRequest, now: float) -> None:
        """Unbook the prompt's tokens, which prefill has computed; the request stays booked. Idempotent."""
        self.computed(r, now)
        entry = self._workers.get(r.prefill) if r.prefill else None
        if entry is not None:
            entry.load -= r.prefill_loaded
        r.prefill_loaded = 0

    def unbook_prefill(self, r: RoutedRequest, now: float) -> None:
        """Unbook the request from its prefill worker, which isn't its decode worker. Idempotent."""
        entry = self._workers.get(r.prefill) if r.prefill else None
        if entry is not None:
            entry.unbook(r.id, r.prefill_loaded)
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
        load: dict[WorkerKey, int] = {}
        members: dict[WorkerKey, set[RequestId]] = {}
        for r, target in requests:
            for key, prompt in ((r.prefill, r.prefill_loaded), (r.decode, None), (target, None)):
                if key is not None:
                    sequence = known.sequence_load if (known := self._workers.get(key)) is not None else 1
                    load[key] = load.get(key, 0) + (sequence if prompt is None else prompt)
                    members.setdefault(key, set()).add(r.id)
        for entry in self._workers:
            if entry.breaker.probe is not None and entry.breaker.probe not in entry.requests:
                found.append(f"{entry.record.name}: its breaker waits for a request that it doesn't have")
            want = load.get(entry.key, 0)
            if not set(entry.prompts) <= entry.requests:
                found.append(f"{entry.record.name}: prompts wait there whose requests aren't booked")
            if entry.load != want:
                found.append(f"{entry.record.name}: load is booked as {entry.load}, requests add up to {want}")
            if entry.requests != members.pop(entry.key, set()):
                found.append(f"{entry.record.name}: booked requests differ from the requests that name it")
        return found + [f"requests name {name} #{inc}, which is not in the table" for name, inc in members]
