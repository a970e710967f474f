"""The custom resources of Ray by which its nodes say how many workers' processes of each role they take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from twinpool.contracts.ids import Role

RESOURCES = {Role.PREFILL: "twinpool_prefill", Role.DECODE: "twinpool_decode", Role.COLOCATED: "twinpool_colocated"}
"""The custom resource of Ray that each rank of a worker of a role takes one of."""


def has_places(resources: Mapping[str, float]) -> bool:
    """Whether a node with these Ray resources takes workers of any role."""
    return any(resources.get(name, 0) > 0 for name in RESOURCES.values())


def resource_example(roles: Iterable[Role]) -> str:
    """The value of `ray start --resources` for a node with places for workers of `roles`."""
    return "{" + ", ".join(f'"{RESOURCES[role]}": N' for role in roles) + "}"
