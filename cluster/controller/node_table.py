"""The nodes of the cluster as the controller knows them, and which of them are cordoned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

NODE_ID_CHARS = 8
"""The first characters of a Ray node id that are enough to name a node."""


@dataclass(frozen=True, slots=True)
class NodePlace:
    """A node that workers can be placed on."""

    node_id: str
    """The Ray node id, hex; empty without Ray."""
    host: str
    """The node's host name."""

    def named(self, name: str) -> bool:
        """Whether `name` means this node: its host name, or (the beginning of) its Ray node id."""
        return bool(name) and (self.host == name or (len(name) >= NODE_ID_CHARS and self.node_id.startswith(name)))


NOWHERE = NodePlace("", "")
"""The place of a worker whose node isn't known."""


class NodeTable:
    """The nodes that take workers, and the names of cordoned ones."""

    def __init__(self, cordoned: Iterable[str] = ()) -> None:
        self.places: tuple[NodePlace, ...] = ()
        """The nodes that workers can be placed on; none while none are known."""
        self.names = set(cordoned)
        """Names of cordoned nodes, as operators and Ray gave them."""

    def cordoned(self, node: NodePlace) -> bool:
        """Whether no worker may be placed on this node."""
        return bool(self.names) and any(node.named(name) for name in self.names)

    def cordon(self, name: str) -> None:
        self.names.add(name)

    def uncordon(self, name: str, known: Iterable[NodePlace]) -> None:
        """Take back all cordons of the node called `name`, under whichever of its names; `known`: nodes that workers
        are or were on."""
        same = {node for node in {*self.places, *known} if node.named(name)}
        self.names -= {one for one in self.names if one == name or any(node.named(one) for node in same)}

    def free(self, only: str = "") -> bool:
        """Whether some node can take a worker, or none is known. `only`: the one node that will do; empty: any."""
        able = [node for node in self.places if not only or node.named(only)]
        return not self.places or any(not self.cordoned(node) for node in able)
