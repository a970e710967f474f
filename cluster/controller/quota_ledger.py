"""The quota ledger: what is left of tenants' limits in the whole cluster, and which router holds a slice of it.

A limit of a minute is a token bucket, and one of answers in flight a number of places. Routers hold slices of both, for
`VALID_S` seconds from their last claim on. A claim gives back what the router held, less what it says to have used, and
takes a new slice; who doesn't come again has its slice taken back whole. So what goes through in the cluster is at most
a tenant's limit and one slice of each router: of one whose word is lost or late.

The next controller has the buckets and slices as they were at most `SAVE_S` ago (`kept`), and goes on from there: the
time in which no controller was there fills no bucket.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from twinpool.contracts.clock import Clock
from twinpool.contracts.messages.leases import QuotaAmounts, QuotaClaim, QuotaSlice
from twinpool.contracts.outside_data import read_json

log = logging.getLogger("twinpool.controller")

MINUTE_S = 60.0
SAVE_S = 1.0
"""Seconds between two times that changed buckets are kept for the next controller."""
MAX_KEPT = 4096
"""Slices that are kept for the next controller; tenants beyond it, the longest unasked first, begin full there."""
VALID_S = 5.0
"""Seconds from a claim on for which its slice is the router's."""
FORGET_S = 600.0
"""Seconds of silence after which nothing is known of a router any more."""
MAX_TENANTS = 4096
"""Tenants whose buckets are kept; beyond it the one that nobody has asked for longest is forgotten."""
MAX_ROUTERS = 256
"""Routers that can hold slices of one tenant's limits; others get none."""


@dataclass(slots=True)
class HeldSlice:
    """What one router holds, and what it has said to have used since its start."""

    requests: float = 0.0
    tokens: float = 0.0
    concurrent: int = 0
    said_requests: float = 0.0
    said_tokens: float = 0.0
    claimed_at: float = 0.0


@dataclass(slots=True)
class TenantQuota:
    """One tenant's buckets: what is left in them, apart from what routers hold."""

    limits: QuotaAmounts
    requests: float
    tokens: float
    at: float
    held: dict[str, HeldSlice] = field(default_factory=dict)
    """By router."""


class QuotaLedger:
    """The quotas of all tenants; see the module's prose."""

    def __init__(self, clock: Clock, kept: str = "") -> None:
        """`kept`: by the controller before (`kept`); what can't be read is said, and every bucket is full then."""
        self._clock = clock
        self._tenants: dict[str, TenantQuota] = {}
        """Who was asked for last is last."""
        self.changed = False
        """Whether anything has been leased since `kept` was called."""
        try:
            self._take_up(read_json(kept or "{}"))
        except (ValueError, TypeError, AttributeError) as error:
            log.warning("what the controller before had of tenants' quotas can't be read: %r", error)
            self._tenants.clear()

    def __len__(self) -> int:
        """Tenants whose buckets are kept."""
        return len(self._tenants)

    def kept(self) -> str:
        """What the next controller needs, as JSON of bounded size."""
        self.changed = False
        rows: dict[str, Any] = {}
        slices = 0
        for tenant, quota in reversed(self._tenants.items()):
            slices += 1 + len(quota.held)
            if slices > MAX_KEPT:
                break
            held = {router: dataclasses.astuple(one)[:-1] for router, one in quota.held.items()}
            rows[tenant] = [structs.astuple(quota.limits), quota.requests, quota.tokens, held]
        return json.dumps(rows, separators=(",", ":"))

    def _take_up(self, rows: dict[str, Any]) -> None:
        """Go on with what an earlier ledger has kept. Raises `ValueError`, `TypeError` or `AttributeError`."""
        now = self._clock.now()
        for tenant, (limits, requests, tokens, held) in reversed(rows.items()):
            slices = {router: HeldSlice(*[*one, now]) for router, one in held.items()}
            self._tenants[tenant] = TenantQuota(QuotaAmounts(*limits), requests, tokens, now, slices)

    def lease(self, router: str, claim: QuotaClaim) -> QuotaSlice:
        """Settle what `router` has used, and lease it a slice in place of the one that it held."""
        self.changed = True
        now, limits, wanted = self._clock.now(), claim.limits, claim.wanted
        quota = self._tenants.pop(claim.tenant, None) or TenantQuota(limits, limits.requests, limits.tokens, now)
        self._tenants[claim.tenant] = quota
        if len(self._tenants) > MAX_TENANTS:
            del self._tenants[next(iter(self._tenants))]
        self._take_back(quota, now)
        if router not in quota.held and len(quota.held) >= MAX_ROUTERS:
            held, wanted = HeldSlice(), QuotaAmounts()
        else:
            held = self._settle(quota, router, claim, now)
        self._fill(quota, limits, now)
        held.requests = _part(wanted.requests, quota.requests)
        held.tokens = _part(wanted.tokens, quota.tokens)
        held.concurrent = int(_part(wanted.concurrent, self._left(quota, limits).concurrent))
        quota.requests -= held.requests
        quota.tokens -= held.tokens
        granted = QuotaAmounts(held.requests, held.tokens, held.concurrent)
        return QuotaSlice(claim.tenant, granted, self._left(quota, limits))

    def _settle(self, quota: TenantQuota, router: str, claim: QuotaClaim, now: float) -> HeldSlice:
        """Take back what a router holds, less what it has used since its last word. Of one that is new here nothing is
        known that it used before."""
        used = claim.used
        held = quota.held.setdefault(router, HeldSlice(said_requests=used.requests, said_tokens=used.tokens))
        quota.requests += held.requests - max(0.0, used.requests - held.said_requests)
        quota.tokens += held.tokens - max(0.0, used.tokens - held.said_tokens)
        held.requests, held.tokens, held.concurrent = 0.0, 0.0, 0
        held.said_requests = max(held.said_requests, used.requests)
        held.said_tokens = max(held.said_tokens, used.tokens)
        held.claimed_at = now
        return held

    @staticmethod
    def _take_back(quota: TenantQuota, now: float) -> None:
        """Take back the slices of routers that didn't come again in time."""
        for router, held in list(quota.held.items()):
            if now - held.claimed_at >= VALID_S:
                quota.requests += held.requests
                quota.tokens += held.tokens
                held.requests, held.tokens, held.concurrent = 0.0, 0.0, 0
            if now - held.claimed_at >= FORGET_S:
                del quota.held[router]

    @staticmethod
    def _fill(quota: TenantQuota, limits: QuotaAmounts, now: float) -> None:
        """Fill the buckets for the time since the last claim, in which what was settled just now was used. What is held
        isn't filled up again; a limit that there wasn't before begins full."""
        minutes, quota.at = (now - quota.at) / MINUTE_S, now
        known, quota.limits, holders = quota.limits, limits, quota.held.values()
        quota.requests = quota.requests if known.requests else limits.requests
        quota.tokens = quota.tokens if known.tokens else limits.tokens
        requests = limits.requests - sum(held.requests for held in holders)
        tokens = limits.tokens - sum(held.tokens for held in holders)
        quota.requests = min(requests, quota.requests + minutes * limits.requests)
        quota.tokens = min(tokens, quota.tokens + minutes * limits.tokens)

    @staticmethod
    def _left(quota: TenantQuota, limits: QuotaAmounts) -> QuotaAmounts:
        taken = sum(held.concurrent for held in quota.held.values())
        return QuotaAmounts(quota.requests, quota.tokens, limits.concurrent - taken)


def _part(wanted: float, there: float) -> float:
    return max(0.0, min(wanted, there))
