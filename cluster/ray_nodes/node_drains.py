"""Draining the workers of Ray nodes that are about to be taken away.

`ray drain-node`, an autoscaler that scales down and a provider's preemption notice all make the same entry in Ray's
control store: the node's id and its deadline. Ray doesn't push these entries, so a thread of its own asks for them
every second: a store that doesn't answer must not block `serve`. Such a node is drained once, as `twinpool drain` does
it. An operator who then undrains the node, or a worker on it, is obeyed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping

from twinpool.contracts.messages.worker_status import WorkerView

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
        with_workers = {view.record.node_id for view in views} if nodes else set()
        return sorted(node for node in nodes.keys() - self._told if node and node in with_workers)

    def told(self, node: str) -> None:
        """Note that the controller has been told to drain a node."""
        self._told.add(node)


def draining_ray_nodes() -> Mapping[str, int]:
    """The nodes that Ray drains, for `NodeDrains`. Read as Ray's own libraries do; there is no public call."""
    import ray._private.state

    nodes: Mapping[str, int] = ray._private.state.state.get_draining_nodes()
    return nodes
