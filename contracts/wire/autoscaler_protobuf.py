"""The autoscaler's messages to protobuf and back."""

from __future__ import annotations

from twinpool.contracts.ids import Role
from twinpool.contracts.messages.autoscaler_messages import AutoscalerView, LatencyCounts, PoolSizing, SizingDecision
from twinpool.contracts.proto import worker_pb2 as pb


def counts_to_proto(router: str, counts: LatencyCounts) -> pb.LatencyReport:
    return pb.LatencyReport(
        router=router,
        requests=counts.requests,
        first_tokens=counts.first_tokens,
        first_late=counts.first_late,
        gaps=counts.gaps,
        gaps_late=counts.gaps_late,
    )


def counts_from_proto(m: pb.LatencyReport) -> LatencyCounts:
    return LatencyCounts(m.requests, m.first_tokens, m.first_late, m.gaps, m.gaps_late)


def autoscaler_to_proto(view: AutoscalerView) -> pb.AutoscalerView:
    return pb.AutoscalerView(
        pools=[
            pb.PoolSizing(
                role=pool.role,
                ready=pool.ready,
                wanted=pool.wanted,
                least=pool.least,
                most=pool.most,
                need=pool.need,
                why=pool.why,
            )
            for pool in view.pools
        ],
        decisions=[pb.SizingDecision(ago_s=one.ago_s, text=one.text) for one in view.decisions],
        held_s=view.held_s,
        counters=view.counters,
    )


def autoscaler_from_proto(m: pb.AutoscalerView) -> AutoscalerView:
    """Read a view. Raises `ValueError` for a role that there isn't."""
    return AutoscalerView(
        pools=tuple(PoolSizing(Role(p.role), p.ready, p.wanted, p.least, p.most, p.need, p.why) for p in m.pools),
        decisions=tuple(SizingDecision(one.ago_s, one.text) for one in m.decisions),
        held_s=m.held_s,
        counters=dict(m.counters),
    )
