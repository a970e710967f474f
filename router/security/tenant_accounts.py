"""What tenants have asked for: requests and tokens of the last minute, and answers in flight, against their limits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from contracts.errors import TwinpoolError
from contracts.key_file import TenantLimits

MINUTE_S = 60.0


class TenantLimited(TwinpoolError):
    """Raised where a tenant asks for more than it may; `retry_after_s`: when it may again, in whole seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = max(1, math.ceil(retry_after_s))


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


@dataclass(slots=True)
class TenantAccount:
    """What one tenant has asked for."""

    in_flight: int = 0
    asked: int = 0
    refused: int = 0
    tokens: int = 0
    budgets: dict[str, RateBudget] = field(default_factory=dict)


class TenantAccounts:
    """The accounts of all tenants. Times are seconds of the service's clock."""

    def __init__(self) -> None:
        self._accounts: dict[str, TenantAccount] = {}

    def check(self, tenant: str, limits: TenantLimits, choices: int, prompt_tokens: int, now: float) -> None:
        """Raise `TenantLimited` where so many answers, and tokens of prompts, are more than the tenant may ask for now.
        Books nothing but the refusal."""
        account = self._accounts.setdefault(tenant, TenantAccount())
        try:
            if limits.concurrent and account.in_flight + choices > limits.concurrent:
                raise TenantLimited(
                    f"{tenant} has {account.in_flight} answers in flight; {limits.concurrent} are allowed at a time", 1
                )
            for what, (amount, limit) in _wanted(limits, prompt_tokens).items():
                budget = account.budgets.setdefault(what, RateBudget(limit, now))
                budget.refill(limit, now)
                if wait_s := budget.wait_s(amount, limit):
                    raise TenantLimited(f"{tenant} may ask for {limit} {what} a minute", wait_s)
        except TenantLimited:
            account.refused += 1
            raise

    def admit(self, tenant: str, limits: TenantLimits, choices: int, prompt_tokens: int, now: float) -> None:
        """Book a request of so many answers and tokens of prompts. Raises as `check` does, having booked nothing."""
        self.check(tenant, limits, choices, prompt_tokens, now)
        account = self._accounts[tenant]
        for what, (amount, _) in _wanted(limits, prompt_tokens).items():
            account.budgets[what].level -= amount
        account.in_flight += choices
        account.asked += 1
        account.tokens += prompt_tokens

    def spend(self, tenant: str, tokens: int) -> None:
        """Book tokens of an answer: they may overdraw, and the next request waits for it."""
        account = self._accounts[tenant]
        account.tokens += tokens
        if budget := account.budgets.get("tokens"):
            budget.level -= tokens

    def ended(self, tenant: str) -> None:
        """Note that one answer has ended."""
        self._accounts[tenant].in_flight -= 1

    @property
    def in_flight(self) -> int:
        """Answers in flight of all tenants."""
        return sum(account.in_flight for account in self._accounts.values())

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


def _wanted(limits: TenantLimits, prompt_tokens: int) -> dict[str, tuple[int, int]]:
    """What one request takes of each budget that is bounded, and its limit a minute."""
    wanted = {"requests": (1, limits.requests_per_minute), "tokens": (prompt_tokens, limits.tokens_per_minute)}
    return {what: (amount, limit) for what, (amount, limit) in wanted.items() if limit}
