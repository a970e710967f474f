"""Quotas: what routers claim of tenants' limits, and the slices that the controller leases them.

A limit of a minute is a budget that fills within a minute. A router takes a slice of it, spends that without asking,
and at its next claim says what it has used since its start and gives back the rest. Numbers that only grow can be said
twice, so a claim whose answer was lost costs nothing.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from twinpool.contracts.key_file import TENANT_CHARS
from twinpool.contracts.message_types import NAME_CHARS, Finite, Int64, Message

QUOTA_PARTS = 8
"""A slice is this part of a limit."""
MAX_CLAIMS = 1024
"""Claims in one call."""
Tenant = Annotated[str, Meta(max_length=TENANT_CHARS)]


def slice_of(limit: int) -> int:
    """Return a slice of a limit: what a router takes at a time, and what it allows itself a minute while the controller
    is away."""
    return -(-limit // QUOTA_PARTS)


class QuotaAmounts(Message, frozen=True):
    """Amounts of each kind that a tenant's limits have."""

    requests: Finite = 0.0
    tokens: Finite = 0.0
    """Of prompts and answers together."""
    concurrent: Int64 = 0
    """Answers in flight."""


class QuotaClaim(Message, frozen=True):
    """What one router wants of one tenant's limits."""

    tenant: Tenant
    limits: QuotaAmounts
    """What the tenant may have a minute, and in flight; 0: no limit."""
    used: QuotaAmounts
    """Requests and tokens that the router has let through since its start."""
    wanted: QuotaAmounts
    """The slice that it wants now, in place of the one that it has; `concurrent` with what is in flight there."""


class QuotaSlice(Message, frozen=True):
    """What one router has of one tenant's limits from now on, in place of what it had."""

    tenant: Tenant
    granted: QuotaAmounts
    left: QuotaAmounts
    """What is left for others; below 0 where answers have overdrawn it."""


class QuotaClaims(Message, frozen=True):
    """What one router wants, in one call."""

    router: Annotated[str, Meta(min_length=1, max_length=NAME_CHARS)]
    """Names one start of the router."""
    claims: Annotated[tuple[QuotaClaim, ...], Meta(max_length=MAX_CLAIMS)]


class QuotaSlices(Message, frozen=True):
    """What it gets, in the order of its claims."""

    slices: Annotated[tuple[QuotaSlice, ...], Meta(max_length=MAX_CLAIMS)]
