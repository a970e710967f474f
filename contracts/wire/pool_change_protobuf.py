"""Operators' changes of pools as calls of the controller."""

from __future__ import annotations

from typing import Any

from twinpool.contracts.messages.pool_changes import (
    AddWorkers,
    CordonNode,
    PoolChange,
    RestartWorker,
    ScalePools,
    UncordonNode,
)
from twinpool.contracts.proto import worker_pb2 as pb


def call_for(stub: Any, change: PoolChange, **options: Any) -> Any:
    """Begin the call of `stub` (a client of the service `Controller`) that makes a change; `options` are gRPC's."""
    match change:
        case AddWorkers():
            size = pb.PoolSize(role=change.role, count=change.count, node=change.node, operator=True)
            return stub.Add(size, **options)
        case ScalePools():
            pools = [pb.PoolSize(role=role, count=count) for role, count in change.counts.items()]
            return stub.Scale(pb.PoolSizes(pools=pools, empty=change.empty), **options)
        case RestartWorker():
            return stub.Restart(pb.DrainTarget(name=change.name), **options)
        case CordonNode():
            return stub.Cordon(pb.DrainTarget(name=change.node), **options)
        case UncordonNode():
            return stub.Uncordon(pb.DrainTarget(name=change.node), **options)
