"""What tenants have asked for: requests and tokens of the last minute, and answers in flight, against their limits.

A router that has the limits to itself keeps token buckets. One of several draws from slices that the controller leases
it (`HeldQuota`): `lacks`, `claims` and `granted` are for whoever speaks with the controller.

Requests and tokens are spent from the slice that is here, without asking; where it doesn't suffice the router claims
the next one, giving back what is left. While the controller is away a router goes on with what it has, and adds a slice
a minute of its own: so an endpoint with a limit goes on serving, and no router lets through more than
`contracts.messages.leases.slice_of` says.

Times are seconds of the service's clock.

Whose a key is (`ApiKeys`) is read from a file, again whenever that changes.
"""

from __future__ import annotations

import hmac
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twinpool.contracts.errors import ConfigError, TwinpoolError
from twinpool.contracts.json_logs import log
from twinpool.contracts.key_file import ApiKey, KeyFile, TenantLimits, digest_of, read_key_file
from twinpool.contracts.messages.leases import MAX_CLAIMS, QuotaAmounts, QuotaClaim, QuotaSlice, slice_of

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


class TenantLimited(TwinpoolError):
    """Raised where a tenant asks for more than it may; `retry_after_s`: when it may again, in whole seconds."""

    def __init__(self, message: str, retry_after_s: float, numbers: Mapping[str, float]) -> None:
        super().__init__(message)
        self.retry_after_s = max(1, math.ceil(retry_after_s))
        self.numbers = numbers


@dataclass(slots=True)
class RateBudget:
    """A token bucket: it holds a minute's allowance and fills within a minute. It may be overdrawn."""

    level: float
    at: float

    def refill(self, a_minute: int, now: float) -> None:
        self.level = min(a_minute, self.level + (now - self.at) * a_minute / MINUTE_S)
        self.at = now

    def wait_s(self, wanted: float, a_minute: int) -> float:
        """Seconds until it has `wanted`, or is full."""
        return max(0.0, (min(wanted, a_minute) - self.level) * MINUTE_S / a_minute)

    def spend(self, amount: float) -> None:
        self.level -= amount


@dataclass(slots=True)
class TenantAccount:
    """What one tenant has asked for."""

    in_flight: int = 0
    asked: int = 0
    refused: int = 0
    tokens: int = 0
    budgets: dict[str, RateBudget] = field(default_factory=dict)
    """Where the limits are this router's alone."""
    held: HeldQuota | None = None
    """Where they are the cluster's."""

    def budget(self, what: str, limit: int, now: float) -> RateBudget | LeasedBudget:
        if self.held is None:
            return self.budgets.setdefault(what, RateBudget(limit, now))
        return self.held.budget(what)


class TenantAccounts:
    """The accounts of all tenants. Times are seconds of the service's clock."""

    def __init__(self, *, leased: bool = False) -> None:
        """`leased`: limits hold for all routers of a cluster together."""
        self._accounts: dict[str, TenantAccount] = {}
        self._leased = leased
        self._alone = False

    def check(self, tenant: str, limits: TenantLimits, choices: int, prompt_tokens: int, now: float) -> None:
        """Raise `TenantLimited` where so many answers, and tokens of prompts, are more than the tenant may ask for now,
        as far as this router knows. Books nothing but the refusal."""
        account = self._account(tenant, limits, now)
        if (refusal := _refusal(tenant, account, limits, choices, prompt_tokens, now)) is not None:
            account.refused += 1
            raise refusal

    def admit(self, tenant: str, limits: TenantLimits, choices: int, prompt_tokens: int, now: float) -> None:
        """Book a request of so many answers and tokens of prompts. Raises as `check` does, having booked nothing, and
        where slices that are leased don't suffice."""
        self.check(tenant, limits, choices, prompt_tokens, now)
        account = self._accounts[tenant]
        if (short := _short(tenant, account, limits, choices, prompt_tokens)) is not None:
            account.refused += 1
            raise short
        for what, (amount, limit) in _wanted(limits, prompt_tokens).items():
            account.budget(what, limit, now).spend(amount)
        account.in_flight += choices
        account.asked += 1
        account.tokens += prompt_tokens

    def spend(self, tenant: str, tokens: int) -> None:
        """Book tokens of an answer: they may overdraw, and the next request waits for it."""
        account = self._accounts[tenant]
        account.tokens += tokens
        if account.held is not None:
            account.held.answered(tokens)
        elif budget := account.budgets.get("tokens"):
            budget.spend(tokens)

    def ended(self, tenant: str) -> None:
        """Note that one answer has ended."""
        self._accounts[tenant].in_flight -= 1

    def _account(self, tenant: str, limits: TenantLimits, now: float) -> TenantAccount:
        account = self._accounts.setdefault(tenant, TenantAccount())
        if not self._leased:
            return account
        if account.held is None:
            account.held = HeldQuota(limits)
        account.held.limits = limits
        if self._alone:
            account.held.go_alone(now)
        elif account.held.alone:
            account.held.come_back()
        return account

    # ------------------------------------------------------------ slices of the cluster's limits

    def lacks(self, tenant: str, limits: TenantLimits, choices: int, prompt_tokens: int, now: float) -> bool:
        """Whether a slice has to be claimed for a request: what is here doesn't suffice, and the controller may have
        more."""
        account = self._account(tenant, limits, now)
        if account.held is None or account.held.alone:
            return False
        return (
            _short(tenant, account, limits, choices, prompt_tokens) is not None
            and _refusal(tenant, account, limits, choices, prompt_tokens, now) is None
        )

    def wait_for(self, tenant: str, choices: int, prompt_tokens: int, sign: int = 1) -> None:
        """Count a request that waits for a slice in the next claim; `sign` -1: no more."""
        held = self._accounts[tenant].held
        if held is not None:
            held.pending["requests"] += sign
            held.pending["tokens"] += sign * prompt_tokens
            held.pending["concurrent"] += sign * choices
            held.pending += Counter()  # Keeps what is above 0.

    def claims(self, now: float) -> list[QuotaClaim]:
        """Return the claims to be made now: of tenants with requests that wait for slices, and of those whose slices
        are due. The answer to each goes to `granted`."""
        due = [
            (tenant, account, account.held)
            for tenant, account in self._accounts.items()
            if account.held is not None and (account.held.pending or account.held.due(account.in_flight, now))
        ]
        return [held.claim(tenant, account.in_flight, now) for tenant, account, held in due[:MAX_CLAIMS]]

    def granted(self, claims: Sequence[QuotaClaim], slices: Sequence[QuotaSlice], now: float) -> None:
        """Take in the controller's answer."""
        self._alone = False
        for claim, part in zip(claims, slices, strict=False):
            held = self._accounts[claim.tenant].held
            if held is not None and part.tenant == claim.tenant:
                held.granted(claim, part, now)

    def go_alone(self, now: float) -> None:
        """The controller doesn't answer: go on with what is here, and a slice a minute."""
        self._alone = True
        for account in self._accounts.values():
            if account.held is not None:
                account.held.go_alone(now)

    @property
    def alone(self) -> bool:
        """Whether the controller didn't answer the last claim."""
        return self._alone

    @property
    def places(self) -> Counter[str]:
        """Answers that are booked as in flight, by tenant."""
        return Counter({tenant: account.in_flight for tenant, account in self._accounts.items() if account.in_flight})

    @property
    def waiting(self) -> dict[str, Counter[str]]:
        """What is counted of requests that wait for slices, by tenant, in the kinds of `QuotaAmounts`."""
        held = ((tenant, account.held) for tenant, account in self._accounts.items())
        return {tenant: +quota.pending for tenant, quota in held if quota is not None and quota.pending}

    def metrics(self) -> Iterator[Metric]:
        """Yield the families of all tenants."""
        flight = GaugeMetricFamily("twinpool_tenant_in_flight", "Answers in flight", labels=["tenant"])
        families = {
            name: CounterMetricFamily(f"twinpool_tenant_{name}", text, labels=["tenant"])
            for name, text in (
                ("requests", "Requests that were admitted"),
                ("refused", "Requests that were beyond a limit"),
                ("tokens", "Tokens of prompts and answers"),
            )
        }
        for tenant, account in self._accounts.items():
            flight.add_metric([tenant], account.in_flight)
            for name, value in (("requests", account.asked), ("refused", account.refused), ("tokens", account.tokens)):
                families[name].add_metric([tenant], value)
        yield flight
        yield from families.values()


def _refusal(
    tenant: str, account: TenantAccount, limits: TenantLimits, choices: int, prompt_tokens: int, now: float
) -> TenantLimited | None:
    """Why a request is beyond its tenant's limits, as far as is known here; None where it may not be."""
    held = account.held
    known = held is None or held.known(now)
    most = held.may_get(now) if held is not None else limits.concurrent
    if limits.concurrent and account.in_flight + choices > most:
        return _too_many(tenant, limits, account.in_flight + limits.concurrent - most, choices)
    for what, (amount, limit) in _wanted(limits, prompt_tokens).items():
        budget = account.budget(what, limit, now)
        budget.refill(limit, now)
        if known and (wait_s := budget.wait_s(amount, limit)):
            return _too_fast(tenant, limit, what, wait_s, amount, budget)
    return None


def _short(
    tenant: str, account: TenantAccount, limits: TenantLimits, choices: int, prompt_tokens: int
) -> TenantLimited | None:
    """Why the slices that are here don't suffice for a request; None where they do."""
    held = account.held
    if held is None:
        return None
    if account.in_flight + choices > held.max_in_flight:
        return _too_many(tenant, limits, account.in_flight + limits.concurrent - held.max_in_flight, choices)
    for what, (amount, limit) in _wanted(limits, prompt_tokens).items():
        budget = held.budget(what)
        if budget.lacks(amount, limit):
            return _too_fast(tenant, limit, what, 1, amount, budget)
    return None


def _too_many(tenant: str, limits: TenantLimits, in_flight: int, choices: int) -> TenantLimited:
    text = f"{tenant} has {in_flight} answers in flight; {limits.concurrent} are allowed at a time"
    numbers = {
        "answers_asked": choices, "tenant_answers_in_flight": in_flight, "tenant_answers_allowed": limits.concurrent
    }  # fmt: skip
    return TenantLimited(text, 1, numbers)


def _too_fast(
    tenant: str, limit: int, what: str, wait_s: float, amount: int, budget: RateBudget | LeasedBudget
) -> TenantLimited:
    left = max(0.0, budget.level + (budget.left or 0.0 if isinstance(budget, LeasedBudget) else 0.0))
    numbers = {f"{what}_asked": amount, f"{what}_left": round(left, 3), f"{what}_a_minute": limit}
    return TenantLimited(f"{tenant} may ask for {limit} {what} a minute", wait_s, numbers)


def _wanted(limits: TenantLimits, prompt_tokens: int) -> dict[str, tuple[int, int]]:
    """What one request takes of each budget that is bounded, and its limit a minute."""
    wanted = {"requests": (1, limits.requests_per_minute), "tokens": (prompt_tokens, limits.tokens_per_minute)}
    return {what: (amount, limit) for what, (amount, limit) in wanted.items() if limit}


_SHOWN = 16
"""Hexadecimal digits of a hash by which keys are looked up; the rest is compared in constant time."""


class ApiKeys:
    """The keys of one file. Raises `ConfigError` where it can't be read at first; later a bad file changes nothing."""

    def __init__(self, path: Path, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """`now`: the time, by which keys expire."""
        self._path, self._now = path, now
        self._read: tuple[int, int, int] | None = None
        self._keys: dict[str, list[ApiKey]] = {}
        self._content = KeyFile()
        self._take(self._stamp(), read_key_file(path))

    def refresh(self) -> None:
        """Read the file again if it isn't the one that was read last."""
        # Before it is read: what is written meanwhile has another stamp, and is read with the next call.
        if (stamp := self._stamp()) == self._read:
            return
        try:
            self._take(stamp, read_key_file(self._path))
        except ConfigError as error:
            self._read = stamp
            log("keys are as before: their file can't be read", level=logging.ERROR, reason=str(error))

    def tenant_of(self, secret: str) -> str | None:
        """Return the tenant whose key this is, None where it is nobody's or has expired."""
        digest = digest_of(secret)
        found = None
        for key in self._keys.get(digest[:_SHOWN], ()):
            if hmac.compare_digest(key.sha256, digest) and not key.expired(self._now()):
                found = key.tenant
        return found

    def limits(self, tenant: str) -> TenantLimits:
        return self._content.limits(tenant)

    def _take(self, stamp: tuple[int, int, int] | None, content: KeyFile) -> None:
        self._read = stamp
        keys: dict[str, list[ApiKey]] = {}
        for key in content.keys:
            keys.setdefault(key.sha256[:_SHOWN], []).append(key)
        self._keys, self._content = keys, content
        log("keys read", keys=len(content.keys), tenants=len({key.tenant for key in content.keys}))

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
