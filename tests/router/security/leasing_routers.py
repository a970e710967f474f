"""Routers that lease tenants' quotas of a ledger, without a wire: what `router.service.admission` does, by hand."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from twinpool.cluster.controller.quota_ledger import QuotaLedger
from twinpool.contracts.clock import ManualClock, SystemClock
from twinpool.contracts.key_file import TenantLimits
from twinpool.contracts.messages.leases import QuotaClaim, QuotaSlice
from twinpool.router.security.tenant_accounts import TenantAccounts

_NUMBERS = itertools.count()


class LedgerLessor:
    """A controller in this process, which may be away. Implements `router.links.controller_port.QuotaLessor`."""

    def __init__(self) -> None:
        self.ledger = QuotaLedger(SystemClock())
        self.away = False
        self.calls = 0

    async def lease_quota(self, router: str, claims: Sequence[QuotaClaim]) -> list[QuotaSlice]:
        self.calls += 1
        if self.away:
            raise ConnectionError("it is away")
        return [self.ledger.lease(router, claim) for claim in claims]


class LeasingRouter:
    """The accounts of one router; `controller` says whether the controller answers."""

    def __init__(self, ledger: QuotaLedger | None = None, clock: ManualClock | None = None) -> None:
        """Of a controller of its own, unless it is given another one's ledger and clock."""
        self.clock = clock or ManualClock()
        self.ledger = ledger if ledger is not None else QuotaLedger(self.clock)
        self.accounts = TenantAccounts(leased=True)
        self.controller = True
        self.claims = 0
        self.name = f"router-{next(_NUMBERS)}"

    def claim(self) -> None:
        """Make the claims that are due, as the tick does."""
        now = self.clock.now()
        if not (claims := self.accounts.claims(now)):
            return
        self.claims += len(claims)
        if self.controller:
            self.accounts.granted(claims, [self.ledger.lease(self.name, claim) for claim in claims], now)
        else:
            self.accounts.go_alone(now)

    def admit(self, tenant: str, limits: TenantLimits, choices: int, tokens: int, now: float | None = None) -> None:
        """Let a request in at `now`, if slices suffice or can be had. Raises `TenantLimited`."""
        if now is not None:
            self.clock.advance(max(0.0, now - self.clock.now()))
        now = self.clock.now()
        if self.accounts.lacks(tenant, limits, choices, tokens, now):
            self.accounts.wait_for(tenant, choices, tokens)
            self.claim()
            self.accounts.wait_for(tenant, choices, tokens, -1)
        self.accounts.admit(tenant, limits, choices, tokens, now)

    def spend(self, tenant: str, tokens: int) -> None:
        self.accounts.spend(tenant, tokens)

    def ended(self, tenant: str) -> None:
        self.accounts.ended(tenant)

    @property
    def places(self) -> Counter[str]:
        return self.accounts.places


def company(count: int) -> tuple[ManualClock, list[LeasingRouter]]:
    """So many routers of one controller."""
    clock = ManualClock()
    ledger = QuotaLedger(clock)
    return clock, [LeasingRouter(ledger, clock) for _ in range(count)]


def rounds(clock: ManualClock, routers: list[LeasingRouter], seconds: float, step_s: float = 0.5) -> Iterator[float]:
    """Let time pass in steps, in each of which every router makes the claims that are due."""
    for _ in range(round(seconds / step_s)):
        clock.advance(step_s)
        for router in routers:
            router.claim()
        yield clock.now()
