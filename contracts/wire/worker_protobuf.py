"""Statuses, check reports, records and views of workers to protobuf and back."""

from __future__ import annotations

from dataclasses import replace

from twinpool.contracts.ids import Incarnation, WorkerName
from twinpool.contracts.messages.fingerprint import Fingerprint
from twinpool.contracts.messages.worker_status import CheckReport, WorkerLimits, WorkerRecord, WorkerStatus, WorkerView
from twinpool.contracts.proto import worker_pb2 as pb
from twinpool.contracts.wire.unknown_kinds import role_from_proto


def status_to_proto(s: WorkerStatus) -> pb.WorkerStatus:
    return pb.WorkerStatus(
        name=s.name,
        role=s.role,
        state=s.state,
        pid=s.pid,
        node=s.node,
        incarnation=s.incarnation,
        running=s.running,
        waiting=s.waiting,
        pages_total=s.pages_total,
        pages_free=s.pages_free,
        steps=s.steps,
        outgoing=s.outgoing,
        counters=s.counters,
        stalled_s=s.stalled_s,
        longest_step_s=s.longest_step_s,
        last_end=s.last_end,
        plane=s.plane,
        kv_events=s.kv_events,
        kv_replay=s.kv_replay,
        routers=s.routers,
        prompt_tokens=s.prompt_tokens,
        counters_left_out=s.counters_left_out,
        waits=s.waits,
        ungranted=s.ungranted,
    )


def status_from_proto(m: pb.WorkerStatus) -> WorkerStatus:
    return WorkerStatus(
        WorkerName(m.name),
        role_from_proto(m.role),
        m.state,
        m.pid,
        m.node,
        Incarnation(m.incarnation),
        m.running,
        m.waiting,
        m.pages_total,
        m.pages_free,
        m.steps,
        m.outgoing,
        dict(m.counters),
        m.stalled_s,
        m.longest_step_s,
        m.last_end,
        m.plane,
        m.kv_events,
        m.kv_replay,
        m.routers,
        m.prompt_tokens,
        m.counters_left_out,
        m.waits,
        m.ungranted,
    )


def report_to_proto(r: CheckReport) -> pb.CheckReport:
    return pb.CheckReport(
        name=r.name,
        pages=r.pages,
        slots=r.slots,
        leases=r.leases,
        rooms=r.rooms,
        violations=r.violations,
        kept_answers=r.kept_answers,
    )


def report_from_proto(m: pb.CheckReport) -> CheckReport:
    return CheckReport(WorkerName(m.name), m.pages, m.slots, m.leases, m.rooms, tuple(m.violations), m.kept_answers)


def fingerprint_to_proto(fingerprint: Fingerprint) -> pb.Fingerprint:
    return pb.Fingerprint(
        protocol=fingerprint.protocol,
        layout=fingerprint.layout,
        numerics=fingerprint.numerics,
        weights=fingerprint.weights,
    )


def fingerprint_from_proto(m: pb.Fingerprint) -> Fingerprint:
    return Fingerprint(m.protocol, m.layout, m.numerics, m.weights)


def view_from_proto(m: pb.WorkerView) -> WorkerView:
    """Read a row of the controller's table; a worker without a status is ``starting``. Raises `UnknownKind` for a role
    that this build doesn't know."""
    record = record_from_proto(m.registration)
    incarnation = Incarnation(m.status.incarnation or record.incarnation)
    record = replace(record, incarnation=incarnation)
    status = status_from_proto(m.status) if m.status.name else None
    if status is None:
        status = WorkerStatus(record.name, record.role, "starting", record.pid, record.node, incarnation, 0, 0, 0, 0)
    return WorkerView(record, status, m.cordoned)


def record_from_proto(m: pb.Registration) -> WorkerRecord:
    """Read a worker's record; raises `UnknownKind` for a role that this build doesn't know."""
    return WorkerRecord(
        name=WorkerName(m.name),
        role=role_from_proto(m.role),
        incarnation=Incarnation(m.incarnation),
        pid=m.pid,
        node=m.node,
        endpoint=m.endpoint,
        control=m.control,
        fits=WorkerLimits(m.max_positions, m.context),
        node_id=m.node_id,
        fingerprint=fingerprint_from_proto(m.fingerprint) if m.HasField("fingerprint") else None,
        stream=m.stream,
        settings=m.settings,
        build=m.build,
        stream_protocol=m.stream_protocol,
    )


def record_to_proto(record: WorkerRecord) -> pb.Registration:
    """Return a worker's record as its registration message."""
    return pb.Registration(
        name=record.name,
        role=record.role,
        pid=record.pid,
        node=record.node,
        endpoint=record.endpoint,
        control=record.control,
        max_positions=record.fits.max_positions,
        context=record.fits.context,
        incarnation=record.incarnation,
        node_id=record.node_id,
        fingerprint=fingerprint_to_proto(record.fingerprint) if record.fingerprint is not None else None,
        stream=record.stream,
        settings=record.settings,
        build=record.build,
        stream_protocol=record.stream_protocol,
    )
