"""Log lines for the findings of audits and the flags of the stream watch."""

from __future__ import annotations

import logging

from twinpool.contracts.damage import DamageSite
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.state.router_log import log
from twinpool.router.verification.audits import AuditFinding, AuditResult
from twinpool.router.verification.stream_watch import StreamFlag

_LEVELS = {AuditResult.DAMAGED: logging.ERROR, AuditResult.DISPUTED: logging.ERROR}


def log_finding(finding: AuditFinding) -> None:
    """Log one line for a finding: the positions that differ, the workers that served them, and the auditors."""
    leg = finding.leg
    log(
        "state damage" if finding.result is AuditResult.DAMAGED else "audit",
        level=_LEVELS.get(finding.result, logging.WARNING),
        where=str(DamageSite.AUDIT),
        request_id=finding.request_id,
        result=str(finding.result),
        checked=finding.checked,
        differing=finding.differing,
        differences=[(d.position, d.drawn, round(d.gap, 4)) for d in finding.differences],
        attempt=leg.attempt if leg is not None else None,
        workers={str(role): name for role, name in leg.workers.items()} if leg is not None else {},
        role=finding.role,
        auditors=list(finding.auditors),
        reason=finding.message,
    )


def log_flag(flag: StreamFlag, request: RoutedRequest) -> None:
    log(
        "stream looks broken",
        level=logging.WARNING,
        request_id=flag.request_id,
        why=str(flag.why),
        position=flag.position,
        workers={str(role): name for role, name in request.workers.items()},
        attempt=request.attempt,
        room=request.room,
        detail=flag.detail,
    )
