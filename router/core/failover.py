"""Failover: what becomes of a request whose attempt has failed. A function of values; it changes nothing.

Several kinds of trouble, as many prices:

- A worker is lost or reports a retryable error: one replay of `router.replay_limit`. The worker at fault is avoided
  for a while that doubles, so that a request neither burns its replays on a dead worker nor gives up a live one.
- A worker refuses because it drains: no replay is spent, but refusals are bounded too.
- A worker's logits for it are no finite numbers: it is computed once more, on other workers where there are any, from
  its tokens alone (nothing cached is taken), and ends with an error if that comes to the same.
- Decode has no memory for it any more (retracted): nobody is avoided, and where the attempt has brought a token nothing
  is spent; else it counts as a refusal.
- All of its tokens had been told: nothing is missing, and it ends well.
"""

from __future__ import annotations

from dataclasses import dataclass

from contracts.config.router_config import RouterConfig
from contracts.errors import ErrorKind
from contracts.ids import Role
from contracts.messages.worker_events import Done
from router.state.routed_request import AttemptCost, RoutedRequest
from router.state.worker_table import WorkerKey

REFUSAL_LIMIT = 64
NONFINITE_REPLAYS = 1
"""How often a request is computed once more because its logits were no finite numbers."""


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """An attempt that has failed: by a worker's word, by its loss, or by an end that can't be true."""

    reason: str
    at_fault: WorkerKey | None = None
    """Who is avoided, where the attempt costs a replay."""
    cost: AttemptCost = AttemptCost.REPLAY
    kind: ErrorKind = ErrorKind.WORKER
    ended: tuple[Role, ...] = ()
    """Legs that have ended themselves: they needn't be cancelled."""
    reporter: WorkerKey | None = None
    """Who says so, which counts against the worker at fault. Absent for a loss, which is counted once, however many
    requests it struck."""
    fatal: str = ""
    """Why no other attempt can help; empty where one may."""


@dataclass(frozen=True, slots=True)
class Retry:
    """The next attempt may begin at `not_before`; until `avoid_until` not on the worker `avoid`."""

    cost: AttemptCost
    not_before: float
    avoid: WorkerKey | None = None
    avoid_until: float = 0.0


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends with an error. `cost` None: what is left of its limits has nothing to do with it."""

    kind: ErrorKind
    message: str
    cost: AttemptCost | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """The request has its whole answer."""

    done: Done


class Failover:
    """What follows a failed attempt, within the limits of the configuration."""

    def __init__(self, limits: RouterConfig) -> None:
        self._limits = limits

    def of_error(self, r: RoutedRequest, worker: WorkerKey, done: Done) -> AttemptFailure:
        """The failure that a worker of a request reports."""
        kind = done.error or ErrorKind.WORKER
        # What one worker took can't be the client's fault at the next: it may still hold an attempt that was lost here.
        if not kind.retryable and not (kind is ErrorKind.INVALID and r.attempt):
            message = done.message or f"{worker[0]} failed the request: {kind}"
            return AttemptFailure(message, kind=kind, fatal=message)
        ended = (Role.PREFILL,) if worker == r.prefill else (Role.DECODE,)
        at_fault = next((key for key in (r.prefill, r.decode) if key and key[0] == done.blame), worker)
        reason = f"{worker[0]}: {kind}: {done.message}"
        if kind is ErrorKind.DRAINING:
            return AttemptFailure(reason, at_fault, AttemptCost.REFUSAL, kind, ended)
        if kind is ErrorKind.RETRACTED:
            gained = r.next_position > r.base
            return AttemptFailure(reason, None, AttemptCost.FREE if gained else AttemptCost.REFUSAL, kind, ended)
        fatal = ""
        if kind is ErrorKind.NONFINITE and r.nonfinite >= NONFINITE_REPLAYS:
            fatal = f"{done.message}; it was computed twice; last: {worker[0]}"
        return AttemptFailure(reason, at_fault, AttemptCost.REPLAY, kind, ended, worker, fatal)

    def after(
        self, r: RoutedRequest, failure: AttemptFailure, now: float, *, replaceable: bool
    ) -> Retry | Fail | Finish:
        """What follows. `replaceable`: whether another worker is or will be there that can do what the worker at fault
        does."""
        if failure.fatal:
            return Fail(failure.kind, failure.fatal)
        if done := r.ending:
            return Finish(done)
        replays = r.replays + (failure.cost is AttemptCost.REPLAY)
        refusals = r.refusals + (failure.cost is AttemptCost.REFUSAL)
        if replays > self._limits.replay_limit or refusals > REFUSAL_LIMIT:
            kind = ErrorKind.WORKER if failure.kind.retryable else failure.kind
            message = f"the request failed {replays + refusals} times on its workers; last: {failure.reason}"
            return Fail(kind, message, failure.cost)
        if failure.cost is not AttemptCost.REPLAY:
            return Retry(failure.cost, now)
        back_off_s = 0.0 if replays <= 1 else min(0.05 * 2 ** (replays - 2), 1.0)
        elsewhere = failure.kind is ErrorKind.NONFINITE and replaceable
        avoid_until = r.deadline if elsewhere else now + min(0.25 * 2**replays, 5.0)
        return Retry(failure.cost, now + back_off_s, failure.at_fault, avoid_until)
