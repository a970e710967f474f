"""The leases of tenants' quotas: claims slices of the controller, before requests that need them and while they are
used.

One call is under way at a time, for all tenants that need one. A request that lacks a slice waits for it; where no
answer comes the controller counts as away, and nobody waits until it has answered again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from twinpool.contracts.clock import Clock
from twinpool.contracts.key_file import TenantLimits
from twinpool.contracts.messages.quota import QuotaClaim, QuotaSlice
from twinpool.router.security.tenant_accounts import TenantAccounts
from twinpool.router.state.router_log import log

TRIES = 3
"""Claims that one request waits for; others of its tenant may take what each brings."""
AWAY_RETRY_S = 1.0


class QuotaLessor(Protocol):
    """The controller, as it leases quotas."""

    async def lease_quota(self, router: str, claims: Sequence[QuotaClaim]) -> Sequence[QuotaSlice]:
        """Return a slice for each claim, in order. Raises `ConnectionError` where the controller doesn't answer."""


class QuotaLeases:
    """The calls of one router for its tenants' slices; on its event loop. `name` is of this start of the router."""

    def __init__(self, accounts: TenantAccounts, lessor: QuotaLessor, name: str, clock: Clock) -> None:
        self._accounts, self._lessor, self._name, self._clock = accounts, lessor, name, clock
        self._call: asyncio.Task[None] | None = None
        self._waiting: dict[asyncio.Task[object], tuple[str, int, int]] = {}
        """Tenant, choices and tokens of each request that waits for a slice."""
        self._retry_at = 0.0

    async def ensure(self, tenant: str, limits: TenantLimits, choices: int, prompt_tokens: int) -> None:
        """Have slices here for a request, if the tenant may make it; the caller looks whether they are."""
        asked = tenant, limits, choices, prompt_tokens
        if not self._accounts.lacks(*asked, self._clock.now()):
            return
        task = asyncio.current_task()
        assert task is not None
        self._accounts.wait_for(tenant, choices, prompt_tokens)
        self._waiting[task] = (tenant, choices, prompt_tokens)
        try:
            for _ in range(TRIES):
                if self._call is not None:  # Its claims may have been made before this request came.
                    await asyncio.shield(self._call)
                if not self._accounts.lacks(*asked, self._clock.now()) or (call := self._begin()) is None:
                    return
                await asyncio.shield(call)
        finally:
            del self._waiting[task]
            self._accounts.wait_for(tenant, choices, prompt_tokens, -1)

    def tick(self) -> None:
        """Claim what is due; to be called every 100 ms or so."""
        if self._call is None and (not self._accounts.alone or self._clock.now() >= self._retry_at):
            self._begin()

    def check(self) -> list[str]:
        """Recount what waits for slices; returns a sentence for each disagreement."""
        wanted: dict[str, Counter[str]] = {}
        for tenant, choices, tokens in self._waiting.values():
            wanted.setdefault(tenant, Counter()).update(requests=1, tokens=tokens, concurrent=choices)
        counted = self._accounts.waiting
        found = [
            f"requests of {tenant} wait for {dict(+wanted.get(tenant, Counter()))}, {dict(counted.get(tenant, {}))} "
            "is claimed for them"
            for tenant in sorted(wanted.keys() | counted.keys())
            if +wanted.get(tenant, Counter()) != counted.get(tenant, Counter())
        ]
        ended = sum(task.done() for task in self._waiting)
        return [*found, f"{ended} requests have ended and still wait for a slice"] if ended else found

    def close(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def _begin(self) -> asyncio.Task[None] | None:
        """Make the claims that are to be made, unless some are under way; returns the call, None where none is to be
        made."""
        if self._call is None and (claims := self._accounts.claims(self._clock.now())):
            self._call = asyncio.get_running_loop().create_task(self._claim(claims))
            self._call.add_done_callback(self._done)
        return self._call

    def _done(self, call: asyncio.Task[None]) -> None:
        self._call = None

    async def _claim(self, claims: Sequence[QuotaClaim]) -> None:
        was_alone = self._accounts.alone
        try:
            slices = await self._lessor.lease_quota(self._name, claims)
        except ConnectionError as error:
            now = self._clock.now()
            self._retry_at = now + AWAY_RETRY_S
            self._accounts.go_alone(now)
            if not was_alone:
                log("quotas alone", reason=str(error))
            return
        self._accounts.granted(claims, slices, self._clock.now())
        if was_alone:
            log("quotas leased again")
