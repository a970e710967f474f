"""Request records to protobuf and back."""

from __future__ import annotations

import math

from twinpool.contracts.errors import WireError
from twinpool.contracts.messages.request_record import (
    MAX_CANDIDATES,
    PlacementChoice,
    RecordEvent,
    RecordSpan,
    RefusedWorkers,
    RequestRecord,
    WorkerCandidate,
)
from twinpool.contracts.proto import worker_pb2 as pb
from twinpool.contracts.wire.unknown_kinds import role_from_proto

MAX_RECORD_BYTES = 256 * 1024
"""The most bytes of one record on the wire."""


def record_to_proto(record: RequestRecord) -> pb.RequestRecord:
    return pb.RequestRecord(
        request_id=record.request_id,
        answer_id=record.answer_id,
        client_id=record.client_id,
        router=record.router,
        model=record.model,
        tenant=record.tenant,
        arrived=record.arrived,
        total_s=record.total_s,
        first_token_s=record.first_token_s,
        outcome=record.outcome,
        message=record.message,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        held_tokens=record.held_tokens,
        generated=record.generated,
        transfer_bytes=record.transfer_bytes,
        attempts=record.attempts,
        migrations=record.migrations,
        retractions=record.retractions,
        uncertainty_s=record.uncertainty_s,
        trace_id=record.trace_id,
        spans=[
            pb.RecordSpan(
                name=span.name,
                start_s=span.start_s,
                end_s=span.end_s,
                worker=span.worker,
                detail=span.detail,
                hidden=span.hidden,
            )
            for span in record.spans
        ],
        events=[
            pb.RecordEvent(at_s=event.at_s, kind=event.kind, worker=event.worker, text=event.text)
            for event in record.events
        ],
        choices=[_choice_to_proto(choice) for choice in record.choices],
        left_out=record.left_out,
        refused_status=record.refused_status,
        numbers=record.numbers,
    )


def _choice_to_proto(choice: PlacementChoice) -> pb.PlacementChoice:
    return pb.PlacementChoice(
        at_s=choice.at_s,
        attempt=choice.attempt,
        role=choice.role,
        chosen=choice.chosen,
        unit=choice.unit,
        candidates=[
            pb.WorkerCandidate(worker=one.worker, cost=one.cost, held=one.held, load=one.load)
            for one in choice.candidates
        ],
        others=choice.others,
        refused=[
            pb.RefusedWorkers(reason=some.reason, count=some.count, workers=some.workers) for some in choice.refused
        ],
        why=choice.why,
    )


def record_from_proto(m: pb.RequestRecord) -> RequestRecord:
    """A record from the wire. Raises `WireError` for one that is too large, and for times that are no numbers;
    `UnknownKind` for a role that this build doesn't know."""
    if m.ByteSize() > MAX_RECORD_BYTES:
        raise WireError(f"a request record has at most {MAX_RECORD_BYTES} bytes, this one {m.ByteSize()}")
    times = [m.arrived, m.total_s, m.first_token_s, m.uncertainty_s, *(event.at_s for event in m.events)]
    times += [at for span in m.spans for at in (span.start_s, span.end_s)]
    times += [at for choice in m.choices for at in (choice.at_s, *(one.cost for one in choice.candidates))]
    times += m.numbers.values()
    if not all(map(math.isfinite, times)):
        raise WireError("a request record's times and costs are finite numbers")
    return RequestRecord(
        m.request_id,
        m.answer_id,
        m.client_id,
        m.router,
        m.model,
        m.tenant,
        m.arrived,
        m.total_s,
        m.first_token_s if m.HasField("first_token_s") else None,
        m.outcome,
        m.message,
        m.prompt_tokens,
        dict(m.cached_tokens),
        m.held_tokens,
        m.generated,
        m.transfer_bytes,
        m.attempts,
        m.migrations,
        m.retractions,
        m.uncertainty_s,
        m.trace_id,
        tuple(RecordSpan(s.name, s.start_s, s.end_s, s.worker, s.detail, s.hidden) for s in m.spans),
        tuple(RecordEvent(e.at_s, e.kind, e.worker, e.text) for e in m.events),
        tuple(map(_choice_from_proto, m.choices)),
        m.left_out,
        m.refused_status,
        dict(m.numbers),
    )


def _choice_from_proto(m: pb.PlacementChoice) -> PlacementChoice:
    return PlacementChoice(
        m.at_s,
        m.attempt,
        role_from_proto(m.role),
        m.chosen,
        m.unit,
        tuple(WorkerCandidate(c.worker, c.cost, c.held, c.load) for c in m.candidates[:MAX_CANDIDATES]),
        m.others,
        tuple(RefusedWorkers(some.reason, some.count, tuple(some.workers)) for some in m.refused),
        m.why,
    )
