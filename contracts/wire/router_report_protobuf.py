"""Routers' reports to protobuf and back."""

from __future__ import annotations

import math

from twinpool.contracts.errors import WireError
from twinpool.contracts.messages.latency_shape import BUCKETS
from twinpool.contracts.messages.router_report import COUNTERS, MAX_BREAKERS, NAME_CHARS, RouterIdentity, RouterReport
from twinpool.contracts.proto import worker_pb2 as pb


def router_report_to_proto(r: RouterReport) -> pb.RouterReport:
    return pb.RouterReport(
        router=r.router,
        node=r.node,
        pid=r.pid,
        build=r.build,
        model=r.model,
        in_flight=r.in_flight,
        waiting=r.waiting,
        counters=r.counters,
        first_tokens=r.first_tokens,
        gaps=r.gaps,
        output_tokens=r.output_tokens,
        cpu_s=r.cpu_s,
        ttft_slo_s=r.ttft_slo_s,
        open_breakers=r.open_breakers[:MAX_BREAKERS],
        viewers=r.viewers,
        name=r.identity.name[:NAME_CHARS],
        address=r.identity.address[:NAME_CHARS],
        settings=r.identity.settings,
        kept=r.identity.kept,
        tokens_per_s=r.tokens_per_s,
    )


def router_report_from_proto(m: pb.RouterReport) -> RouterReport:
    """Read a report; counters of names that this build doesn't know are left out. Raises `WireError` for one that makes
    no sense."""
    texts = (m.router, m.node, m.build, m.model, m.name, m.address, m.settings, *m.open_breakers)
    if not m.router or any(len(text) > NAME_CHARS for text in texts) or len(m.open_breakers) > MAX_BREAKERS:
        raise WireError(f"a report names its router, and no name has more than {NAME_CHARS} characters")
    if any(len(counts) not in (0, BUCKETS) for counts in (m.first_tokens, m.gaps, m.output_tokens)):
        raise WireError(f"a histogram of latencies has {BUCKETS} buckets")
    if not all(0 <= seconds < math.inf for seconds in (m.cpu_s, m.ttft_slo_s)):
        raise WireError(f"times are numbers of seconds, not {m.cpu_s} and {m.ttft_slo_s}")
    return RouterReport(
        m.router,
        m.node,
        m.pid,
        m.build,
        m.model,
        m.in_flight,
        m.waiting,
        {name: m.counters[name] for name in COUNTERS if name in m.counters},
        tuple(m.first_tokens),
        tuple(m.gaps),
        tuple(m.open_breakers),
        m.viewers,
        RouterIdentity(m.name, m.address, m.settings, m.kept),
        tuple(m.output_tokens),
        m.cpu_s,
        m.tokens_per_s,
        m.ttft_slo_s,
    )
