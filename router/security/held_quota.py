"""What one router holds of one tenant's limits: slices that the controller leases it.

Requests and tokens are spent from the slice that is here, without asking; where it doesn't suffice the router claims
the next one, giving back what is left. While the controller is away a router goes on with what it has, and adds a slice
a minute of its own: so an endpoint with a limit goes on serving, and no router lets through more than
`contracts.messages.quota.slice_of` says.

Times are seconds of the service's clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from twinpool.contracts.key_file import TenantLimits
from twinpool.contracts.messages.quota import QuotaAmounts, QuotaClaim, QuotaSlice, slice_of

MINUTE_S = 60.0
RENEW_S = 1.0
"""A slice that is used is claimed anew after so many seconds: then others know what is left."""
FRESH_S = 1.0
"""For so long what the controller has left is believed, where it is too little: nobody asks again."""
ROUNDING = 1e-6
UNSAID = (-1.0, -1.0)


@dataclass(slots=True)
class LeasedBudget:
    """A router's part of a limit of a minute."""

    level: float = 0.0
    """What is here to be spent; answers may overdraw it."""
    used: float = 0.0
    """What was spent since the router's start."""
    left: float | None = None
    """What the controller had left at `at`; None: it has never said."""
    at: float = 0.0
    alone: bool = False
    """Whether the controller is away."""

    def refill(self, a_minute: int, now: float) -> None:
        """Reckon what has been filled since `at`: by the controller, or here while it is away."""
        minutes, self.at = max(0.0, now - self.at) / MINUTE_S, max(now, self.at)
        if self.alone:
            share = slice_of(a_minute)
            self.level = min(max(self.level, share), self.level + minutes * share)
        elif self.left is not None:
            self.left = min(a_minute - max(0.0, self.level), self.left + minutes * a_minute)

    def lacks(self, wanted: float, a_minute: int) -> bool:
        """Whether less is here than `wanted`, or than all that there can be."""
        return self._most(wanted, a_minute) - self.level > ROUNDING

    def wait_s(self, wanted: float, a_minute: int) -> float:
        """Seconds until `wanted` can be here, as far as it is known; 0: it is here, or the controller may have it."""
        missing = self._most(wanted, a_minute) - self.level
        if not self.alone:
            missing = missing - self.left if self.left is not None else 0.0
        a_minute = slice_of(a_minute) if self.alone else a_minute
        return missing * MINUTE_S / a_minute if missing > ROUNDING else 0.0

    def _most(self, wanted: float, a_minute: int) -> float:
        return min(wanted, slice_of(a_minute) if self.alone else a_minute)

    def spend(self, amount: float) -> None:
        self.level -= amount
        self.used += amount


@dataclass(slots=True)
class HeldQuota:
    """One tenant's slices in one router. `in_flight` of its methods: answers of the tenant in flight here."""

    limits: TenantLimits
    requests: LeasedBudget = field(default_factory=LeasedBudget)
    tokens: LeasedBudget = field(default_factory=LeasedBudget)
    places: int = 0
    """Answers that may be in flight here."""
    places_left: int = 0
    """What the controller had left of them when it answered last."""
    told_at: float | None = None
    """When the controller answered last."""
    claimed_at: float = 0.0
    claimed: tuple[float, float] = (0.0, 0.0)
    """What the last claim said was used; what was never used where it wasn't answered."""
    pending: Counter[str] = field(default_factory=Counter)
    """What requests want that wait for a slice, by the kinds of `QuotaAmounts`."""
    alone: bool = False

    def budget(self, what: str) -> LeasedBudget:
        return self.requests if what == "requests" else self.tokens

    def answered(self, tokens: int) -> None:
        """Spend tokens of an answer, which may overdraw."""
        if self.limits.tokens_per_minute:
            self.tokens.spend(tokens)

    @property
    def max_in_flight(self) -> int:
        """Answers that may be in flight here without asking; no end where there is no limit."""
        if not self.limits.concurrent:
            return 1 << 62
        return max(self.places, slice_of(self.limits.concurrent)) if self.alone else self.places

    def may_get(self, now: float) -> int:
        """Answers that may be in flight here, as far as is known, were all that the controller has left claimed."""
        if self.alone or not self.limits.concurrent:
            return self.max_in_flight
        return self.places + max(0, self.places_left) if self.known(now) else self.limits.concurrent

    def due(self, in_flight: int, now: float) -> bool:
        """Whether slices are to be claimed anew: they were used or are held for a while, or are overdrawn by one."""
        used = (self.requests.used, self.tokens.used) != self.claimed
        tokens = self.limits.tokens_per_minute
        if not (tokens or self.limits.requests_per_minute or self.limits.concurrent):
            return False
        if used and tokens and not self.alone and self.tokens.level < -slice_of(tokens) and now > self.claimed_at:
            return True
        answers = self.places or (in_flight and self.limits.concurrent)
        held = used or answers or self.requests.level > ROUNDING or self.tokens.level > ROUNDING
        return bool(held) and now - self.claimed_at >= RENEW_S

    def known(self, now: float) -> bool:
        """Whether it is known what there is: from the controller, lately, or because it is away."""
        return self.alone or (self.told_at is not None and now - self.told_at < FRESH_S)

    def claim(self, tenant: str, in_flight: int, now: float) -> QuotaClaim:
        """Return what is wanted now: what requests wait for and, while the tenant is active, a slice beyond that."""
        limits, pending = self.limits, self.pending
        active = bool(in_flight or pending) or (self.requests.used, self.tokens.used) != self.claimed
        self.claimed, self.claimed_at = (self.requests.used, self.tokens.used), now

        def slice_for(kind: str, limit: int) -> int:
            return min(pending[kind] + slice_of(limit), limit) if active and limit else 0

        places = 0
        if limits.concurrent and (in_flight or pending["concurrent"]):
            spare = self.told_at is None or 2 * self.places_left > limits.concurrent
            places = in_flight + pending["concurrent"] + (slice_of(limits.concurrent) if spare else 0)
        return QuotaClaim(
            tenant,
            QuotaAmounts(limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent),
            QuotaAmounts(self.requests.used, self.tokens.used),
            QuotaAmounts(
                slice_for("requests", limits.requests_per_minute),
                slice_for("tokens", limits.tokens_per_minute),
                min(places, limits.concurrent),
            ),
        )

    def granted(self, claim: QuotaClaim, part: QuotaSlice, now: float) -> None:
        """Take in the controller's answer to a claim; what was spent meanwhile is off its slices."""
        self.alone, self.told_at = False, now
        for budget, granted, said, left in (
            (self.requests, part.granted.requests, claim.used.requests, part.left.requests),
            (self.tokens, part.granted.tokens, claim.used.tokens, part.left.tokens),
        ):
            budget.alone, budget.at, budget.left = False, now, left
            budget.level = granted - (budget.used - said)
        self.places, self.places_left = part.granted.concurrent, part.left.concurrent

    def go_alone(self, now: float) -> None:
        """The controller is away: go on with what is here, and claim again. A tenant of which nothing was known begins
        with a slice."""
        self.claimed = UNSAID
        if self.alone:
            return
        for budget, limit in (
            (self.requests, self.limits.requests_per_minute),
            (self.tokens, self.limits.tokens_per_minute),
        ):
            if budget.left is None:
                budget.level = max(budget.level, slice_of(limit))
            budget.alone, budget.at = True, now
        self.alone = True

    def come_back(self) -> None:
        """The controller has answered for another tenant: ask it before anything is refused."""
        self.alone, self.told_at = False, None
        self.requests.alone = self.tokens.alone = False
