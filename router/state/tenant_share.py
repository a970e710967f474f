"""A tenant as workers see it: its name, and its share of what not all can have at once."""

from __future__ import annotations

from typing import NamedTuple


class TenantShare(NamedTuple):
    """Whose a request is. Requests of one tenant are served in order; tenants in proportion to their weights."""

    tenant: str = ""
    """Empty: nobody's, where nobody needs a key."""
    weight: int = 1


NOBODYS = TenantShare()
