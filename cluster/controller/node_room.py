"""Nodes: which there are and are cordoned, what they have for workers, and whether more fit there.

The supervisor tells it, since it knows the plan: for each node its memory, the processes that its cores take, the
places that Ray gives there, the cards that were dealt, and what a worker of each role takes. The controller counts
from its table who is there, and asks before any worker is added (`PoolOperations`) and before any is started
(`StartQueue`). While no supervisor has told anything, nothing is known and everything fits.

Memory is counted twice, and both must do. By the plan: what a node had before the cluster ran, less what its workers
may take at most, whether or not they have taken it yet. And by what is free now, which others on the machine may have
taken: only for workers beyond those that the node was planned for, whose memory was looked at before the start.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import msgspec
from msgspec.structs import replace

from twinpool.contracts.ids import Role, WorkerName
from twinpool.contracts.message_types import SOME, Int64, Message, Uint32

NODE_ID_CHARS = 8
"""The first characters of a Ray node id that are enough to name a node."""


class NodePlace(Message, frozen=True):
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


ANY_NUMBER = 1 << 30
MANY_NODES = 3
"""Nodes that a refusal names; further ones are counted."""


class RoleRoom(Message, frozen=True):
    """What a worker of one role takes of a node, and what the node has for that role."""

    nbytes: Int64
    """Bytes of the node's memory that it takes at most."""
    ranks: Annotated[int, msgspec.Meta(ge=1, le=2**32 - 1)] = 1
    """Its processes."""
    planned: Uint32 = 0
    """Workers that the node's memory was divided for."""
    places: Uint32 | None = None
    """Processes of this role that Ray places there at most; None: any number."""
    together: Annotated[int, msgspec.Meta(ge=1, le=2**32 - 1)] = 1
    """Workers that share their experts, and so start, restart and leave together (`prefill.dp`)."""
    over_hosts: bool = False
    """Whether the ranks of a worker may be on several nodes (`cluster.ranks_over_hosts`)."""


class NodeRoom(Message, frozen=True):
    """What a node has for workers."""

    node: NodePlace
    memory: Int64
    """Bytes that all workers may take together, less what they share."""
    processes: Uint32 = ANY_NUMBER
    """Processes of workers that its cores take (`cluster.workers_per_core`)."""
    starts: Uint32 = ANY_NUMBER
    """Workers that start there at once (`cluster.starts_at_once`)."""
    roles: Annotated[Mapping[str, RoleRoom], SOME] = msgspec.field(default_factory=dict)
    """By `Role`. What is told of roles that this build doesn't know is never asked for: it starts no workers of
    those."""
    cards: Annotated[tuple[WorkerName, ...], SOME] | None = None
    """The workers that its GPUs were dealt to; None where that binds nobody."""
    free: Int64 | None = None
    """Bytes of its memory that are free now; None: nobody looks."""

    def is_at(self, node: NodePlace) -> bool:
        """Whether this is `node`. Of a Ray of our own only the host is known, as there is no other node."""
        return self.node.node_id == node.node_id if self.node.node_id else self.node.host == node.host

    def named(self, name: str) -> bool:
        """Whether `name` means this node; any does where there is no other."""
        return not self.node.node_id or self.node.named(name)


class Occupant(NamedTuple):
    """A worker that is there, or is to be added."""

    name: WorkerName
    role: Role
    node: NodePlace = NOWHERE
    """Where it is; `NOWHERE` where that isn't known, or it has yet to be placed."""
    only: str = ""
    """The one node that it is to run on; empty: any."""
    starts: bool = False
    """Whether it is starting, and has yet to take what it will."""
    others: tuple[NodePlace, ...] = ()
    """Where its ranks from 1 on are, if some are on other nodes than `node`."""


class ClusterRoom(Message, frozen=True):
    """What all nodes have for workers. Values; nothing here is changed."""

    nodes: Annotated[tuple[NodeRoom, ...], SOME] = ()
    grows: bool = False
    """Whether workers that no node has room for may wait for one to join (`cluster.wait_for_nodes`)."""

    def together(self, role: Role) -> int:
        """How many workers of `role` share their experts."""
        return max((node.roles[role].together for node in self.nodes if role in node.roles), default=1)

    def refusal(self, there: Iterable[Occupant], more: Sequence[Occupant]) -> str:
        """Why `more` workers don't fit beside those `there`, with the numbers and how many would; empty where all of
        them do, or may wait for nodes."""
        if not self.nodes or self.grows:
            return ""
        left = self._left(there)
        for role, only in dict.fromkeys((one.role, one.only) for one in more):
            names = [one.name for one in more if (one.role, one.only) == (role, only)]
            before = _copies(left)
            if (fit := _place(left, role, names, only)) < len(names):
                return _refusal([one for one in before if not only or one.room.named(only)], role, len(names), fit)
        return ""

    def more(self, there: Iterable[Occupant], role: Role, names: Sequence[WorkerName]) -> tuple[int, str]:
        """How many of the workers `names` of a role fit, the first ones, and why not all of them; all of them where
        they may wait for nodes."""
        if not self.nodes or self.grows:
            return len(names), ""
        left = self._left(there)
        before = _copies(left)
        fit = _place(left, role, names, "")
        return fit, _refusal(before, role, len(names), fit) if fit < len(names) else ""

    def nodes_for(self, there: Iterable[Occupant], more: Sequence[Occupant]) -> list[NodeRoom]:
        """The nodes that each have room for all of `more`, which are alike but for their names; all that `there` may
        still take is taken."""
        role, only, names = more[0].role, more[0].only, [one.name for one in more]
        left = [one for one in self._left(there) if not only or one.room.named(only)]
        able = [one for one in left if one.fits(role, names) == len(names)]
        if not able and _spread(_copies(left), role, len(names)) == len(names):
            able = [one for one in left if one.ranks_left(role)]  # Ranks fit on several of them together.
        return [one.room for one in able]

    def _left(self, there: Iterable[Occupant]) -> list[_Left]:
        left = [_Left(room) for room in self.nodes]
        homeless = []
        for one in there:
            home = next((each for each in left if one.node.host and each.room.is_at(one.node)), None)
            if one.others:
                for node in (one.node, *one.others):
                    for each in left:
                        if each.room.is_at(node):
                            each.take_ranks(one.role, 1)
            elif home is not None:
                home.hold(one)
            else:
                homeless.append(one)
        for one in homeless:
            able = [each for each in left if not one.only or each.room.named(one.only)]
            if able:
                max(able, key=lambda each: each.fits(one.role, [one.name], planned=True)).hold(one)
        return left

    def to_json(self) -> str:
        """All but what is free now, for the ledger."""
        kept = replace(self, nodes=tuple(replace(node, free=None) for node in self.nodes))
        return msgspec.json.encode(kept).decode()

    @classmethod
    def from_json(cls, text: str) -> ClusterRoom:
        """Raises `ValueError` where it can't be read."""
        return msgspec.json.decode(text, type=cls)


@dataclass(slots=True)
class _Left:
    """What is left of one node while it is being filled."""

    room: NodeRoom
    memory: int = 0
    processes: int = 0
    free: int | None = None
    unfilled: dict[str, int] = field(default_factory=dict)
    """Workers of each role that the node was planned for and that aren't there."""
    places: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        room = self.room
        self.memory, self.processes, self.free = room.memory, room.processes, room.free
        self.unfilled = {role: one.planned for role, one in room.roles.items()}
        self.places = {role: one.places for role, one in room.roles.items() if one.places is not None}

    def hold(self, one: Occupant) -> None:
        """Count a worker that is there, whether or not it should be."""
        need = self.room.roles.get(one.role)
        if need is None:
            return
        self._take(one.role, need, 1)
        if one.starts and self.free is not None:
            self.free -= need.nbytes

    def fits(self, role: Role, names: Sequence[WorkerName], *, planned: bool = False) -> int:
        """How many of these workers fit, the first ones. `planned`: by the plan alone."""
        need = self.room.roles.get(role)
        if need is None:
            return 0
        most = min(self.memory // max(1, need.nbytes), self.processes // need.ranks)
        if role in self.places:
            most = min(most, self.places[role] // need.ranks)
        if self.free is not None and not planned:
            most = min(most, max(0, self.unfilled[role]) + max(0, self.free) // max(1, need.nbytes))
        if self.room.cards is not None:
            dealt = [name in self.room.cards for name in names]
            most = min(most, dealt.index(False) if False in dealt else len(names))
        return max(0, min(most, len(names)))

    def ranks_left(self, role: Role) -> int:
        """How many ranks of a worker fit here whose others are on other nodes; 0 where there are no such workers."""
        need = self.room.roles.get(role)
        if need is None or not need.over_hosts:
            return 0
        most = min(self.memory // max(1, need.nbytes // need.ranks), self.processes)
        return max(0, min(most, self.places.get(role, most)))

    def take_ranks(self, role: Role, count: int) -> None:
        """Count ranks of workers whose others are elsewhere."""
        need = self.room.roles.get(role)
        if need is None:
            return
        self.memory -= count * (need.nbytes // need.ranks)
        self.processes -= count
        if role in self.places:
            self.places[role] -= count

    def add(self, role: Role, count: int) -> None:
        """Count workers that are to be added."""
        need = self.room.roles[role]
        if self.free is not None:
            self.free -= max(0, count - max(0, self.unfilled[role])) * need.nbytes
        self._take(role, need, count)

    def _take(self, role: Role, need: RoleRoom, count: int) -> None:
        self.memory -= count * need.nbytes
        self.processes -= count * need.ranks
        self.unfilled[role] -= count
        if role in self.places:
            self.places[role] -= count * need.ranks

    def said(self, role: Role) -> str:
        """What is left, in words."""
        room, need = self.room, self.room.roles.get(role)
        host = room.node.host or "this machine"
        if need is None:
            return f"{host} takes no {role} workers"
        if room.cards is not None:
            return f"all GPUs of {host} are dealt to the {len(room.cards)} workers it started with"
        found = [f"{_mib(max(0, self.memory))} of {_mib(room.memory)} of memory"]
        if self.free is not None:
            found.append(f"{_mib(max(0, self.free))} free now")
        if room.processes < ANY_NUMBER:
            found.append(f"{max(0, self.processes)} of {room.processes} processes (cluster.workers_per_core)")
        if need.places is not None:
            found.append(f"{max(0, self.places[role])} of {need.places} places of Ray")
        return f"{host} has {', '.join(found)} left"


def _copies(left: Sequence[_Left]) -> list[_Left]:
    copied = [copy.copy(one) for one in left]
    for one in copied:
        one.unfilled, one.places = dict(one.unfilled), dict(one.places)
    return copied


def _place(left: Sequence[_Left], role: Role, names: Sequence[WorkerName], only: str) -> int:
    """Fill nodes with workers, in order; returns how many of them fit. Groups that share their experts are on one node
    each; one worker may come back to the others of its group alone."""
    placed = 0
    for one in left:
        if placed < len(names) and (not only or one.room.named(only)):
            fit = one.fits(role, names[placed:])
            together = one.room.roles[role].together if fit else 1
            if len(names) % together == 0:
                fit -= fit % together
            if fit:
                one.add(role, fit)
            placed += fit
    if placed < len(names) and not only:
        placed += _spread(left, role, len(names) - placed)
    return placed


def _spread(left: Sequence[_Left], role: Role, count: int) -> int:
    """Fill nodes with workers whose ranks may be on several of them; returns how many of `count` fit."""
    ranks = max((one.room.roles[role].ranks for one in left if role in one.room.roles), default=1)
    fit = min(count, sum(one.ranks_left(role) for one in left) // ranks)
    need = fit * ranks
    for one in left:
        taken = min(need, one.ranks_left(role))
        one.take_ranks(role, taken)
        need -= taken
    return fit


def _refusal(left: Sequence[_Left], role: Role, asked: int, fit: int) -> str:
    needs = [one.room.roles[role] for one in left if role in one.room.roles]
    each = ""
    if needs:
        ranks = max(need.ranks for need in needs)
        processes = "1 process" if ranks == 1 else f"{ranks} processes"
        each = f"each takes about {_mib(max(need.nbytes for need in needs))} at most and {processes}; "
    nodes = "; ".join(one.said(role) for one in left[:MANY_NODES])
    further = f"; and {len(left) - MANY_NODES} further nodes" if len(left) > MANY_NODES else ""
    fits = f"{fit} would" if fit else "none would"
    return f"{asked} more {role} worker{'s' * (asked != 1)} would not fit, {fits}: {each}{nodes}{further}"


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
