"""The places on Ray's nodes that workers take when their processes go on in another role.

Ray can't take back the place that an actor was started in. So such a process takes one of its new role besides, on its
node, by a placement group without processes. It is found by its name by the launchers that come after this one.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from twinpool.cluster.controller.controller_actions import WorkerKey

NODE_LABEL = "ray.io/node-id"
PLACE_WAIT_S = 5.0
"""Seconds in which Ray gives a place that is free on a node."""
_NAMED = re.compile(r"[a-z]+-\d+\.\d+\.(place|ranks)")


def place_name(worker: WorkerKey) -> str:
    """The name of the placement group with the places of an incarnation."""
    return f"{worker[0]}.{worker[1]}.place"


def ranks_name(actor: str) -> str:
    """The name of the placement group that a worker of several ranks was started in, by its leader's actor."""
    return f"{actor}.ranks"


def take_places(worker: WorkerKey, resources: dict[str, float], ranks: int, node_id: str, *, kept: bool) -> Any:
    """Ask for places with `resources` on a node, for each rank of a worker; returns their placement group. `kept`:
    beyond this process."""
    here = [{NODE_LABEL: node_id}] * ranks
    return placement_group(
        [resources] * ranks,
        strategy="STRICT_PACK",
        bundle_label_selector=here,
        name=place_name(worker),
        lifetime="detached" if kept else None,
    )


def places_taken(group: Any) -> bool:
    """Whether places that were asked for were free."""
    return bool(group.wait(PLACE_WAIT_S))


def kept_places(workers: Container[str]) -> dict[str, Any]:
    """The placement groups that earlier launchers of this cluster have made for `workers` (`place_name`, `ranks_name`),
    by name. Those of workers that have ended are removed."""
    found = {}
    for row in ray.util.placement_group_table().values():
        if not _NAMED.fullmatch(row["name"]) or row["state"] == "REMOVED":
            continue
        try:
            group = ray.util.get_placement_group(row["name"])
        except ValueError:
            continue  # Of another cluster on this Ray.
        if row["name"] in workers:
            found[row["name"]] = group
        else:
            remove_placement_group(group)
    return found
