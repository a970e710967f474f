"""Quotas to protobuf and back."""

from __future__ import annotations

import math

from twinpool.contracts.errors import WireError
from twinpool.contracts.key_file import TENANT_CHARS
from twinpool.contracts.messages.quota import QuotaAmounts, QuotaClaim, QuotaSlice
from twinpool.contracts.proto import worker_pb2 as pb


def claim_to_proto(claim: QuotaClaim) -> pb.QuotaClaim:
    return pb.QuotaClaim(
        tenant=claim.tenant,
        limits=_amounts_to_proto(claim.limits),
        used=_amounts_to_proto(claim.used),
        wanted=_amounts_to_proto(claim.wanted),
    )


def claim_from_proto(m: pb.QuotaClaim) -> QuotaClaim:
    """Raises `WireError` for a name that is too long, and for numbers that are none."""
    if len(m.tenant) > TENANT_CHARS:
        raise WireError(f"a tenant's name has at most {TENANT_CHARS} characters; got {len(m.tenant)}")
    return QuotaClaim(m.tenant, *(_amounts_from_proto(part) for part in (m.limits, m.used, m.wanted)))


def slice_to_proto(part: QuotaSlice) -> pb.QuotaSlice:
    return pb.QuotaSlice(tenant=part.tenant, granted=_amounts_to_proto(part.granted), left=_amounts_to_proto(part.left))


def slice_from_proto(m: pb.QuotaSlice) -> QuotaSlice:
    """Raises `WireError` for numbers that are none."""
    return QuotaSlice(m.tenant, _amounts_from_proto(m.granted), _amounts_from_proto(m.left))


def _amounts_to_proto(amounts: QuotaAmounts) -> pb.QuotaAmounts:
    return pb.QuotaAmounts(requests=amounts.requests, tokens=amounts.tokens, concurrent=amounts.concurrent)


def _amounts_from_proto(m: pb.QuotaAmounts) -> QuotaAmounts:
    if not (math.isfinite(m.requests) and math.isfinite(m.tokens)):
        raise WireError("a quota's amounts are finite numbers")
    return QuotaAmounts(m.requests, m.tokens, m.concurrent)
