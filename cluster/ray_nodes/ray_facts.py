"""What a Ray says of itself and its nodes, asked without joining it; and which of those that were joined drain.

``python -m twinpool.cluster.ray_nodes.ray_facts ADDRESS``

Ray reads its environment when it is imported, and may wait for long; so it is asked in a process of its own, which has
a deadline.

**Nodes that are about to be taken away** (`NodeDrains`). `ray drain-node`, an autoscaler that scales down and a
provider's preemption notice all make the same entry in Ray's control store: the node's id and its deadline. Ray doesn't
push these entries, so a thread of its own asks for them every second: a store that doesn't answer must not block
`serve`. Such a node is drained once, as `twinpool drain` does it. An operator who then undrains the node, or a worker
on it, is obeyed.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Role
from twinpool.contracts.messages.worker_status import WorkerView
from twinpool.contracts.python_command import module_command

RESOURCES = {Role.PREFILL: "twinpool_prefill", Role.DECODE: "twinpool_decode", Role.COLOCATED: "twinpool_colocated"}
"""The custom resource of Ray that each rank of a worker of a role takes one of."""


def has_places(resources: Mapping[str, float]) -> bool:
    """Whether a node with these Ray resources takes workers of any role."""
    return any(resources.get(name, 0) > 0 for name in RESOURCES.values())


def resource_example(roles: Iterable[Role]) -> str:
    """The value of `ray start --resources` for a node with places for workers of `roles`."""
    return "{" + ", ".join(f'"{RESOURCES[role]}": N' for role in roles) + "}"


ASK_S = 30.0
"""Seconds in which a Ray must have answered, the start of the process that asks it included."""
_CALL_S = 5.0


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node of a Ray that is alive."""

    name: str
    places: Mapping[str, float] = field(default_factory=dict)
    """Its resources for workers (`twinpool_prefill` and so on), by name."""


@dataclass(frozen=True, slots=True)
class RayFacts:
    """A Ray that answers."""

    ray: str
    """Its version."""
    python: str
    nodes: tuple[RayNode, ...] = ()


def ask_ray(address: str) -> RayFacts:
    """Ask the Ray whose control store is at `address`, ``host:port``. Raises `ConfigError` where it doesn't answer."""
    command = module_command("twinpool.cluster.ray_nodes.ray_facts", address)
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)
        if ended.returncode:
            raise OSError((ended.stderr.splitlines() or [f"exit code {ended.returncode}"])[-1])
        said = json.loads(ended.stdout.splitlines()[-1])
        nodes = tuple(RayNode(str(name), places) for name, places in said["nodes"])
        return RayFacts(str(said["ray"]), str(said["python"]), nodes)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"Ray at {address} didn't answer within {ASK_S:g} s") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"Ray at {address} can't be asked: {error!s:.300}") from None


def _ask(address: str) -> dict[str, object]:
    """What `ask_ray` reads, from Ray itself."""
    # Ray has no public way to ask a cluster without being let in as a driver of it.
    import ray._raylet

    client: Any = vars(ray._raylet)["GcsClient"]
    store = client(address=address)
    told = json.loads(store.internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster", timeout=_CALL_S) or b"{}")
    nodes = [
        (
            node.node_manager_hostname or node.node_manager_address,
            {name: node.resources_total[name] for name in RESOURCES.values() if name in node.resources_total},
        )
        for node in store.get_all_node_info(timeout=_CALL_S).values()
        if node.state == 0  # ALIVE
    ]
    return {"ray": told.get("ray_version", "unknown"), "python": told.get("python_version", "unknown"), "nodes": nodes}


log = logging.getLogger("twinpool.nodes")

ASK_EVERY_S = 1.0


class NodeDrains:
    """Follows which nodes Ray drains, and says which of them the controller is to drain."""

    def __init__(self, ask: Callable[[], Mapping[str, int]], every_s: float = ASK_EVERY_S) -> None:
        """`ask` returns the draining nodes: hex id -> deadline in milliseconds since 1970, 0 for none. It is called on
        this object's thread and may raise."""
        self._ask = ask
        self._every_s = every_s
        self._nodes: Mapping[str, int] = {}
        self._told: set[str] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-drains", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop asking. Idempotent."""
        self._end.set()

    def _run(self) -> None:
        failing = False
        while not self._end.wait(self._every_s):
            try:
                self._nodes = dict(self._ask())
                failing = False
            except Exception as error:  # Ray's own, of many kinds; the next time may be better
                if not failing:
                    log.warning("Ray doesn't tell which nodes drain: %s", error)
                failing = True

    @property
    def changed(self) -> bool:
        """Whether Ray drains a node that `told` hasn't named since it does; to be asked again and again."""
        nodes = self._nodes
        self._told &= nodes.keys()
        return bool(nodes.keys() - self._told)

    def due(self, views: Iterable[WorkerView]) -> list[str]:
        """Ids, sorted, of nodes with workers that are to be drained now; each until `told` names it, once for as long
        as Ray drains it."""
        nodes = self._nodes
        with_workers = {node_id for view in views for _, node_id in view.record.nodes} if nodes else set()
        return sorted(node for node in nodes.keys() - self._told if node and node in with_workers)

    def told(self, node: str) -> None:
        """Note that the controller has been told to drain a node."""
        self._told.add(node)


def draining_ray_nodes() -> Mapping[str, int]:
    """The nodes that Ray drains, for `NodeDrains`. Read as Ray's own libraries do; there is no public call."""
    import ray._private.state

    nodes: Mapping[str, int] = ray._private.state.state.get_draining_nodes()
    return nodes


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_ask(sys.argv[1])) + "\n")
