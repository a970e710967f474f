"""What a controller and its supervisor tell each other, to protobuf and back."""

from __future__ import annotations

from collections.abc import Iterable

from twinpool.cluster.controller.controller_actions import (
    ControllerAction,
    EndedProcess,
    ForgetArenas,
    KillWorker,
    OperatorNote,
    PlacedProcess,
    StartFailed,
    StartWorker,
)
from twinpool.cluster.controller.node_room import ClusterRoom, NodePlace, NodeRoom, RoleRoom
from twinpool.contracts.errors import WireError
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.settings_change import SettingsChange
from twinpool.contracts.proto import worker_pb2 as pb
from twinpool.contracts.wire.settings_protobuf import change_from_proto, change_to_proto


def action_to_proto(action: ControllerAction) -> pb.SupervisorOrder:
    match action:
        case StartWorker():
            start = pb.StartWorker(
                name=action.name,
                role=action.role,
                incarnation=action.incarnation,
                avoid=action.avoid,
                only=action.only,
                successor_of=action.successor_of,
            )
            return pb.SupervisorOrder(start=start)
        case KillWorker():
            kill = pb.KillWorker(name=action.name, incarnation=action.incarnation, pid=action.pid, node=action.node)
            return pb.SupervisorOrder(kill=kill)
        case ForgetArenas():
            return pb.SupervisorOrder(forget=pb.ForgetArenas(name=action.name, before=action.before))
        case OperatorNote():
            return pb.SupervisorOrder(note=action.text)
        case StartFailed():
            return pb.SupervisorOrder(failed=pb.EndedProcess(name=action.name, reason=action.reason))
        case SettingsChange():
            return pb.SupervisorOrder(settings=change_to_proto(action))


def action_from_proto(m: pb.SupervisorOrder) -> ControllerAction:
    """Read an order. Raises `WireError` for one that this build doesn't know, or a role that there isn't."""
    try:
        match m.WhichOneof("kind"):
            case "start":
                s = m.start
                name, number = WorkerName(s.name), Incarnation(s.incarnation)
                before = Incarnation(s.successor_of)
                return StartWorker(name, Role(s.role), number, tuple(s.avoid), s.only, before)
            case "kill":
                return KillWorker(WorkerName(m.kill.name), Incarnation(m.kill.incarnation), m.kill.pid, m.kill.node)
            case "forget":
                oldest = Incarnation(m.forget.before) if m.forget.HasField("before") else None
                return ForgetArenas(WorkerName(m.forget.name), oldest)
            case "note":
                return OperatorNote(m.note)
            case "failed":
                return StartFailed(WorkerName(m.failed.name), m.failed.reason)
            case "settings":
                return change_from_proto(m.settings)
            case _:
                raise WireError("an order of the controller that this supervisor doesn't know")
    except ValueError as error:
        raise WireError(str(error)) from None


def ended_to_proto(ended: Iterable[EndedProcess]) -> list[pb.EndedProcess]:
    return [pb.EndedProcess(name=one.name, incarnation=one.incarnation, reason=one.reason) for one in ended]


def ended_from_proto(m: Iterable[pb.EndedProcess]) -> list[EndedProcess]:
    return [EndedProcess(WorkerName(one.name), Incarnation(one.incarnation), one.reason) for one in m]


def placed_to_proto(placed: Iterable[PlacedProcess]) -> list[pb.PlacedProcess]:
    return [
        pb.PlacedProcess(name=one.name, incarnation=one.incarnation, node=node_to_proto(one.node)) for one in placed
    ]


def placed_from_proto(m: Iterable[pb.PlacedProcess]) -> list[PlacedProcess]:
    return [PlacedProcess(WorkerName(one.name), Incarnation(one.incarnation), node_from_proto(one.node)) for one in m]


def node_to_proto(node: NodePlace) -> pb.NodePlace:
    return pb.NodePlace(node_id=node.node_id, host=node.host)


def node_from_proto(m: pb.NodePlace) -> NodePlace:
    return NodePlace(m.node_id, m.host)


def room_to_proto(room: ClusterRoom) -> pb.ClusterRoom:
    return pb.ClusterRoom(nodes=map(_node_room_to_proto, room.nodes), grows=room.grows)


def room_from_proto(m: pb.ClusterRoom) -> ClusterRoom:
    """Roles that this build doesn't know are left out: it starts no workers of those."""
    return ClusterRoom(tuple(map(_node_room_from_proto, m.nodes)), m.grows)


def _node_room_to_proto(node: NodeRoom) -> pb.NodeRoom:
    return pb.NodeRoom(
        node=node_to_proto(node.node),
        memory=node.memory,
        processes=node.processes,
        starts=node.starts,
        roles=[
            pb.RoleRoom(role=role, nbytes=one.nbytes, ranks=one.ranks, planned=one.planned, places=one.places)
            for role, one in node.roles.items()
        ],
        dealt=node.cards is not None,
        cards=node.cards,
        free=node.free,
    )


def _node_room_from_proto(m: pb.NodeRoom) -> NodeRoom:
    return NodeRoom(
        node_from_proto(m.node),
        m.memory,
        m.processes,
        m.starts,
        {
            Role(one.role): RoleRoom(
                one.nbytes, max(1, one.ranks), one.planned, one.places if one.HasField("places") else None
            )
            for one in m.roles
            if one.role in set(Role)
        },
        tuple(map(WorkerName, m.cards)) if m.dealt else None,
        m.free if m.HasField("free") else None,
    )
