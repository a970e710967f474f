"""The workers' events to protobuf and back."""

from __future__ import annotations

from twinpool.contracts.errors import ErrorKind, UnknownKind
from twinpool.contracts.ids import RequestId, WorkerName
from twinpool.contracts.messages.kept_answers import Attached
from twinpool.contracts.messages.worker_events import (
    Audited,
    AuditEnd,
    Done,
    Event,
    LegNote,
    LegReport,
    MigrationDone,
    MigrationPaused,
    MigrationUndone,
    MigrationWanted,
    PrefixOffered,
    PromptScores,
    PullDone,
    PushReady,
    Tokens,
)
from twinpool.contracts.proto import worker_pb2 as pb
from twinpool.contracts.sampling_params import TokenDifference
from twinpool.contracts.wire.kept_protobuf import (
    attached_from_proto,
    attached_to_proto,
    logprob_from_proto,
    logprob_to_proto,
)
from twinpool.contracts.wire.unknown_kinds import role_from_proto


def _audited_to_proto(a: Audited) -> pb.Audited:
    return pb.Audited(
        end=a.end,
        checked=a.checked,
        differing=a.differing,
        differences=[pb.TokenDifference(position=d.position, drawn=d.drawn, gap=d.gap) for d in a.differences],
        exact=a.exact,
        message=a.message,
    )


def _audited_from_proto(request_id: RequestId, attempt: int, m: pb.Audited) -> Audited:
    differences = tuple(TokenDifference(d.position, d.drawn, d.gap) for d in m.differences)
    end = (
        AuditEnd(m.end) if m.end in tuple(AuditEnd) else AuditEnd.REFUSED
    )  # A newer build's end: nothing was computed.
    return Audited(request_id, attempt, end, m.checked, m.differing, differences, m.exact, m.message)


def event_to_proto(event: Event) -> pb.Event:
    out = pb.Event(request_id=event.request_id, attempt=event.attempt)
    match event:
        case Tokens():
            logprobs = [logprob_to_proto(t) for t in event.logprobs]
            out.tokens.CopyFrom(pb.Tokens(position=event.position, tokens=event.tokens, logprobs=logprobs))
        case PromptScores():
            out.prompt_scores.CopyFrom(pb.PromptScores(scores=[logprob_to_proto(t) for t in event.scores]))
        case LegReport():
            out.leg_report.CopyFrom(
                pb.LegReport(
                    role=event.role,
                    worker=event.worker,
                    marks=event.marks,
                    cached_tokens=event.cached_tokens,
                    computed_tokens=event.computed_tokens,
                    transfer_bytes=event.transfer_bytes,
                    cached_by_tier=event.cached_by_tier,
                    notes=[pb.LegNote(kind=n.kind, at_s=n.at_s, bytes=n.bytes, text=n.text) for n in event.notes],
                )
            )
        case Done():
            out.done.CopyFrom(
                pb.Done(
                    reason=event.reason,
                    stop_token=event.stop_token,
                    error=event.error or "",
                    message=event.message,
                    blame=event.blame or "",
                )
            )
        case MigrationWanted():
            out.migration_wanted.CopyFrom(pb.MigrationWanted(started=event.started, withdrawn=event.withdrawn))
        case MigrationPaused():
            out.migration_paused.CopyFrom(pb.MigrationPaused(position=event.position))
        case MigrationUndone():
            out.migration_undone.CopyFrom(pb.MigrationUndone(reason=event.reason))
        case MigrationDone():
            out.migration_done.CopyFrom(pb.BytesSent(bytes=event.bytes))
        case PushReady():
            out.push_ready.CopyFrom(pb.PushReady(positions=event.positions))
        case PullDone():
            out.pull_done.CopyFrom(pb.BytesSent(bytes=event.bytes))
        case PrefixOffered():
            out.prefix_offered.CopyFrom(pb.PrefixOffered(tokens=event.tokens, salt=event.salt))
        case Audited():
            out.audited.CopyFrom(_audited_to_proto(event))
        case Attached():
            out.attached.CopyFrom(attached_to_proto(event))
    return out


def event_from_proto(m: pb.Event) -> Event:
    """An event from the wire. Raises `UnknownKind` for a kind that this build doesn't know."""
    request_id, attempt = RequestId(m.request_id), m.attempt
    match m.WhichOneof("kind"):
        case "tokens":
            t = m.tokens
            logprobs = tuple(logprob_from_proto(x) for x in t.logprobs)
            return Tokens(request_id, attempt, t.position, tuple(t.tokens), logprobs)
        case "prompt_scores":
            scores = tuple(logprob_from_proto(x) for x in m.prompt_scores.scores)
            return PromptScores(request_id, attempt, scores)
        case "leg_report":
            p = m.leg_report
            return LegReport(
                request_id,
                attempt,
                role_from_proto(p.role),
                WorkerName(p.worker),
                dict(p.marks),
                p.cached_tokens,
                p.computed_tokens,
                p.transfer_bytes,
                dict(p.cached_by_tier),
                tuple(LegNote(n.kind, n.at_s, n.bytes, n.text) for n in p.notes),
            )
        case "done":
            d = m.done
            return Done(
                request_id,
                attempt,
                d.reason,
                d.stop_token if d.HasField("stop_token") else None,
                ErrorKind.of(d.error) if d.error else None,
                d.message,
                WorkerName(d.blame) if d.blame else None,
            )
        case "migration_wanted":
            return MigrationWanted(request_id, attempt, m.migration_wanted.started, m.migration_wanted.withdrawn)
        case "migration_paused":
            return MigrationPaused(request_id, attempt, m.migration_paused.position)
        case "migration_undone":
            return MigrationUndone(request_id, attempt, m.migration_undone.reason)
        case "migration_done":
            return MigrationDone(request_id, attempt, m.migration_done.bytes)
        case "push_ready":
            return PushReady(request_id, attempt, m.push_ready.positions)
        case "pull_done":
            return PullDone(request_id, attempt, m.pull_done.bytes)
        case "prefix_offered":
            return PrefixOffered(request_id, attempt, tuple(m.prefix_offered.tokens), m.prefix_offered.salt)
        case "audited":
            return _audited_from_proto(request_id, attempt, m.audited)
        case "attached":
            return attached_from_proto(request_id, attempt, m.attached)
        case kind:
            raise UnknownKind(f"unknown event {kind!r}")
