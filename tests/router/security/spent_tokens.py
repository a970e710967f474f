"""What tenants have had, as everybody can read it: from the metrics."""

from __future__ import annotations

from twinpool.router.security.tenant_accounts import TenantAccounts


def spent_tokens(tenants: TenantAccounts) -> dict[str, int]:
    """Tokens of prompts and answers, by tenant."""
    samples = [sample for family in tenants.metrics() for sample in family.samples]
    return {s.labels["tenant"]: int(s.value) for s in samples if s.name == "twinpool_tenant_tokens_total"}
