"""Failover: what becomes of a request whose attempt has failed. A function of values; it changes nothing.

Each kind of failure has its own cost:

- A worker is lost or reports a retryable error: one replay of `router.replay_limit`. The worker at fault is avoided
  for a time that doubles, so that a request neither burns its replays on a dead worker nor gives up a live one.
- A prefill worker that leaves in order has handed over what it began: its loss costs nothing once what it tells of the
  prompt has arrived, though decode hasn't spoken yet. Decode reports the failure where there is one.
- A worker refuses because it drains: no replay is spent, but refusals are bounded too.
- A worker's logits for the request aren't finite: one replay, on other workers where there are any, from the request's
  tokens alone (no cached state is used). If its logits aren't finite again, the request ends with an error.
- Decode has no memory for the request any more (retracted): no worker is avoided. An attempt that has brought a token
  costs nothing; else it counts as a refusal.
- All tokens of the request were emitted before: nothing is missing, and it ends without an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import Role
from twinpool.contracts.messages.kept_answers import Detach
from twinpool.contracts.messages.router_commands import Cancel
from twinpool.contracts.messages.worker_events import Done
from twinpool.router.state.routed_request import AttemptCost, RoutedRequest
from twinpool.router.state.worker_table import WorkerKey

REFUSAL_LIMIT = 64
"""Refusals that a request may meet; one more ends it with an error."""
NONFINITE_REPLAYS = 1
"""How often a request is computed again because its logits weren't finite."""


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """A failed attempt: a worker reported an error or was lost, or its `Done` contradicts the tokens."""

    reason: str
    at_fault: WorkerKey | None = None
    """The worker to avoid, where the attempt costs a replay; None: no worker is at fault."""
    cost: AttemptCost = AttemptCost.REPLAY
    kind: ErrorKind = ErrorKind.WORKER
    ended: tuple[Role, ...] = ()
    """Roles whose legs have ended by themselves and needn't be cancelled."""
    reporter: WorkerKey | None = None
    """The worker that reports the failure, which counts against the worker at fault. None for a loss, which is counted
    once, however many requests it struck."""
    fatal: str = ""
    """Why no other attempt can help, for the client's error; empty where another one may."""
    leave: type[Cancel | Detach] = Cancel
    """What legs that haven't ended are told where no other attempt follows."""


@dataclass(frozen=True, slots=True)
class Retry:
    """The request may begin its next attempt at `not_before`, and until `avoid_until` not on the worker `avoid`.

    Times are seconds of the router core's clock.
    """

    cost: AttemptCost
    not_before: float
    avoid: WorkerKey | None = None
    avoid_until: float = 0.0


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends with an error. `cost`: of the attempt that exceeded a limit, if one did."""

    kind: ErrorKind
    message: str
    cost: AttemptCost | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """The request has its whole answer, and ends with `done`."""

    done: Done


class Failover:
    """Decides what follows a failed attempt, within the limits of the configuration."""

    def __init__(self, limits: RouterConfig) -> None:
        self._limits = limits

    def of_error(self, r: RoutedRequest, worker: WorkerKey, done: Done) -> AttemptFailure:
        """The failure that a worker reports with an error `Done` of the current attempt."""
        kind = done.error or ErrorKind.WORKER
        if kind is ErrorKind.SUPERSEDED:  # Decode's leg is another router's now. Nobody takes over prefill's.
            return AttemptFailure(done.message, kind=kind, ended=(Role.DECODE,), fatal=done.message, leave=Detach)
        # What one worker took can't be invalid at the next: the latter may still hold an attempt that was lost here.
        if not kind.retryable and not (kind.of_client and r.attempt):
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
        # Cancelled by nobody here: a connection broke, which is counted where it was this router's.
        reporter = None if kind is ErrorKind.CANCELLED else worker
        return AttemptFailure(reason, at_fault, AttemptCost.REPLAY, kind, ended, reporter, fatal)

    def after(
        self, r: RoutedRequest, failure: AttemptFailure, now: float, *, replaceable: bool
    ) -> Retry | Fail | Finish:
        """Decide what follows a failed attempt. `replaceable`: whether the role of the worker at fault has another
        worker, up or coming back."""
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
