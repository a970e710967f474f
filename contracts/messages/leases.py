"""What the controller leases: to workers their places, to routers slices of tenants' limits.

Workers' registrations are `WorkerRecord`s, renewals go by calls or by frames, and grants answer both. A worker's lease
stream begins with a `StreamOpening`; then each of its `Renewal`s is answered by a `LeaseGrant`. Until its first grant
says where the stream is, and wherever it can't be opened, renewals go by calls.

A tenant's limit of a minute is a budget that fills within a minute. A router takes a slice of it, spends that without
asking, and at its next claim says what it has used since its start and gives back the rest. Numbers that only grow can
be said twice, so a claim whose answer was lost costs nothing.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from twinpool.contracts.ids import Incarnation, WorkerName
from twinpool.contracts.key_file import TENANT_CHARS
from twinpool.contracts.message_types import NAME_CHARS, SOME, UNSIGNED, Finite, Int64, Message, Uint64
from twinpool.contracts.messages.worker_status import EndedWorker, WorkerStatus
from twinpool.contracts.sampling_params import WeightsVersion

SILENCE_S = 60.0
"""Seconds without a sign of life after which a stream counts as cut. Renewals are signs of life, and one that isn't
answered in time ends the stream much sooner; so neither end says anything else in between."""
RENEWAL_BYTES = 1024 * 1024
"""Bytes of the largest renewal: a status with its counters."""
UNREAD_BYTES = 64 * 1024
"""Bytes that may wait for a worker when it renews: it does so after its last grant has come, so more of them are of one
that reads none."""
GRANT_BYTES = 4 * 1024 * 1024
"""Bytes of the largest grant: it names the ended incarnations of all workers."""
QUOTA_PARTS = 8
"""A slice is this part of a limit."""
MAX_CLAIMS = 1024
"""Claims in one call."""
Tenant = Annotated[str, Meta(max_length=TENANT_CHARS)]


class Renewal(Message, frozen=True):
    """A worker's heartbeat, by which it renews its lease."""

    name: WorkerName
    incarnation: Annotated[Incarnation, UNSIGNED]
    status: WorkerStatus
    ended_mark: Uint64 = 0
    """Of the list of ended incarnations that the worker has; 0: none."""


class Departure(Message, frozen=True):
    """A worker's word that it has left by drain, which gives its lease back."""

    name: WorkerName
    incarnation: Annotated[Incarnation, UNSIGNED]
    closed: bool = False
    """Whether the worker is closed, and its process can go on as another."""


class DepartureAnswer(Message, frozen=True):
    """The controller's answer to a departure."""

    goes_on: bool = False
    """Whether a plan comes, by which the worker's process goes on: in another role, or with other weights."""
    sleeps: bool = False
    """Whether that plan comes when the cluster is woken, however long that takes."""


class LeaseGrant(Message, frozen=True):
    """The controller's answer to a registration or renewal."""

    incarnation: Annotated[Incarnation, UNSIGNED]
    lease_s: Finite
    """Seconds that the lease lasts; 0 where it is fenced."""
    fenced: bool = False
    """Whether the incarnation is over: the worker must send nothing more and exit."""
    drain: bool = False
    """Whether the worker is to drain and leave, or to change its role."""
    renew_s: Finite = 0.0
    """Seconds after which the worker is to renew; 0: as configured."""
    ended: Annotated[tuple[EndedWorker, ...], SOME] = ()
    """The latest incarnation of each worker that has ended."""
    ended_mark: Uint64 = 0
    """Names this list of `ended`, which is left out where the renewal has named it; 0: none."""
    stream: str = ""
    """Where renewals may go as frames, ``host:port``; empty: nowhere."""
    counters_s: Finite = 0.0
    """Seconds between two heartbeats with counters; 0: as the worker has it."""
    prepare: WeightsVersion | None = None
    """Weights that the worker is to read and check while it serves: the cluster may change to them. None: to none."""
    hurry: bool = False
    """Whether a worker that drains is to end what it still has: others begin it again, as far as they can."""
    paused: bool = False
    """Whether the worker is to make no step until it is told otherwise."""


# ---------------------------------------------------------------- quotas


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
