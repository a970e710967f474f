"""Values to protobuf and back, for the edges between router, workers and controller.

Builds of two versions meet while a cluster is upgraded. Unknown fields are skipped by protobuf itself, messages of
unknown kinds by `known`, and an error of an unknown kind is one of the worker's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from contracts.errors import ErrorKind, UnknownKind
from contracts.fingerprint import Fingerprint
from contracts.ids import Incarnation, RequestId, Role, RoomId, WorkerName
from contracts.messages import (
    Audit,
    Audited,
    AuditEnd,
    Cancel,
    CheckReport,
    Command,
    Done,
    Event,
    Fetch,
    Fetched,
    Forget,
    Give,
    Gives,
    Handover,
    Leaving,
    Moved,
    Offered,
    Paused,
    PeerRef,
    Progress,
    PromptScores,
    Resume,
    Resumed,
    Submit,
    Tokens,
    WorkerStatus,
)
from contracts.proto import worker_pb2 as pb
from contracts.sampling import Difference, SamplingParams, TokenLogprob

Message = TypeVar("Message")
Value = TypeVar("Value")


def known(read: Callable[[Message], Value], messages: Iterable[Message]) -> tuple[list[Value], int]:
    """What `read` makes of those whose kind this build knows, and how many others there are."""
    values, others = list[Value](), 0
    for message in messages:
        try:
            values.append(read(message))
        except UnknownKind:
            others += 1
    return values, others


def role_from_proto(role: str) -> Role:
    """Raises `UnknownKind` for a role that this build doesn't know."""
    if role not in tuple(Role):
        raise UnknownKind(f"unknown role {role!r}")
    return Role(role)


def command_to_proto(command: Command) -> pb.Command:
    match command:
        case Submit():
            return pb.Command(submit=_submit_to_proto(command))
        case Cancel():
            return pb.Command(cancel=pb.Cancel(request_id=command.request_id, attempt=command.attempt))
        case Handover():
            rid, peer = command.request_id, _peer_to_proto(command.peer)
            return pb.Command(
                handover=pb.Handover(request_id=rid, attempt=command.attempt, room=command.room, peer=peer)
            )
        case Resume():
            return pb.Command(resume=pb.Cancel(request_id=command.request_id, attempt=command.attempt))
        case Give():
            return pb.Command(give=_pages_to_proto(command))
        case Fetch():
            return pb.Command(fetch=_pages_to_proto(command))
        case Audit():
            return pb.Command(audit=_audit_to_proto(command))
        case Forget():
            forget = pb.Forget(request_id=command.request_id, tokens=command.tokens, salt=command.salt)
            return pb.Command(forget=forget)


def _pages_to_proto(c: Give | Fetch) -> pb.Pages:
    return pb.Pages(
        request_id=c.request_id,
        attempt=c.attempt,
        room=c.room,
        peer=_peer_to_proto(c.peer),
        tokens=c.tokens,
        salt=c.salt,
        spare=isinstance(c, Fetch) and c.spare,
    )


def command_from_proto(message: pb.Command) -> Command:
    """Raises `UnknownKind`."""
    match message.WhichOneof("kind"):
        case "submit":
            return _submit_from_proto(message.submit)
        case "cancel":
            return Cancel(RequestId(message.cancel.request_id), message.cancel.attempt)
        case "handover":
            h = message.handover
            return Handover(RequestId(h.request_id), h.attempt, RoomId(h.room), _peer_from_proto(h.peer))
        case "give":
            g = message.give
            ids = RequestId(g.request_id), g.attempt, RoomId(g.room), _peer_from_proto(g.peer)
            return Give(*ids, tuple(g.tokens), g.salt)
        case "fetch":
            f = message.fetch
            ids = RequestId(f.request_id), f.attempt, RoomId(f.room), _peer_from_proto(f.peer)
            return Fetch(*ids, tuple(f.tokens), f.salt, f.spare)
        case "resume":
            return Resume(RequestId(message.resume.request_id), message.resume.attempt)
        case "audit":
            return _audit_from_proto(message.audit)
        case "forget":
            old = message.forget
            return Forget(RequestId(old.request_id), tuple(old.tokens), old.salt)
        case kind:
            raise UnknownKind(f"unknown command {kind!r}")


def _peer_to_proto(peer: PeerRef) -> pb.Peer:
    return pb.Peer(name=peer.name, incarnation=peer.incarnation, control=peer.control)


def _peer_from_proto(m: pb.Peer) -> PeerRef:
    return PeerRef(WorkerName(m.name), Incarnation(m.incarnation), m.control)


def _submit_to_proto(s: Submit) -> pb.Submit:
    peer = None
    if s.peer is not None:
        peer = _peer_to_proto(s.peer)
    return pb.Submit(
        request_id=s.request_id,
        attempt=s.attempt,
        room=s.room,
        tokens=s.tokens,
        prompt_len=s.prompt_len,
        sampling=_sampling_to_proto(s.sampling),
        peer=peer,
        salt=s.salt,
        priority=s.priority,
        deadline_s=s.deadline_s,
        moving=s.moving,
    )


def _submit_from_proto(m: pb.Submit) -> Submit:
    peer = None
    if m.HasField("peer"):
        peer = _peer_from_proto(m.peer)
    return Submit(
        request_id=RequestId(m.request_id),
        attempt=m.attempt,
        room=RoomId(m.room),
        tokens=tuple(m.tokens),
        prompt_len=m.prompt_len,
        sampling=_sampling_from_proto(m.sampling),
        peer=peer,
        salt=m.salt,
        priority=m.priority,
        deadline_s=m.deadline_s,
        moving=m.moving,
    )


def _sampling_to_proto(s: SamplingParams) -> pb.Sampling:
    return pb.Sampling(
        max_tokens=s.max_tokens,
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        repetition_penalty=s.repetition_penalty,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        logit_bias=dict(s.logit_bias),
        seed=s.seed,
        choice=s.choice,
        min_tokens=s.min_tokens,
        stop_token_ids=s.stop_token_ids,
        logprobs=s.logprobs,
        prompt_logprobs=s.prompt_logprobs,
    )


def _sampling_from_proto(m: pb.Sampling) -> SamplingParams:
    return SamplingParams(
        max_tokens=m.max_tokens,
        temperature=m.temperature,
        top_p=m.top_p,
        top_k=m.top_k,
        min_p=m.min_p,
        repetition_penalty=m.repetition_penalty,
        presence_penalty=m.presence_penalty,
        frequency_penalty=m.frequency_penalty,
        logit_bias=tuple(sorted(m.logit_bias.items())),
        seed=m.seed,
        choice=m.choice,
        min_tokens=m.min_tokens,
        stop_token_ids=tuple(m.stop_token_ids),
        logprobs=m.logprobs if m.HasField("logprobs") else None,
        prompt_logprobs=m.prompt_logprobs if m.HasField("prompt_logprobs") else None,
    )


def _audit_to_proto(a: Audit) -> pb.Audit:
    return pb.Audit(
        request_id=a.request_id,
        attempt=a.attempt,
        tokens=a.tokens,
        prompt_len=a.prompt_len,
        sampling=_sampling_to_proto(a.sampling),
    )


def _audit_from_proto(m: pb.Audit) -> Audit:
    sampling = _sampling_from_proto(m.sampling)
    return Audit(RequestId(m.request_id), m.attempt, tuple(m.tokens), m.prompt_len, sampling)


def _audited_to_proto(a: Audited) -> pb.Audited:
    return pb.Audited(
        end=a.end,
        checked=a.checked,
        differing=a.differing,
        differences=[pb.Difference(position=d.position, drawn=d.drawn, gap=d.gap) for d in a.differences],
        exact=a.exact,
        message=a.message,
    )


def _audited_from_proto(request_id: RequestId, attempt: int, m: pb.Audited) -> Audited:
    differences = tuple(Difference(d.position, d.drawn, d.gap) for d in m.differences)
    end = (
        AuditEnd(m.end) if m.end in tuple(AuditEnd) else AuditEnd.REFUSED
    )  # A newer build's end: nothing was computed.
    return Audited(request_id, attempt, end, m.checked, m.differing, differences, m.exact, m.message)


def _logprob_to_proto(t: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token=t.token,
        logprob=t.logprob,
        top_tokens=[token for token, _ in t.top],
        top_logprobs=[value for _, value in t.top],
    )


def _logprob_from_proto(m: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(m.token, m.logprob, tuple(zip(m.top_tokens, m.top_logprobs, strict=True)))


def event_to_proto(event: Event) -> pb.Event:
    out = pb.Event(request_id=event.request_id, attempt=event.attempt)
    match event:
        case Tokens():
            logprobs = [_logprob_to_proto(t) for t in event.logprobs]
            out.tokens.CopyFrom(pb.Tokens(position=event.position, tokens=event.tokens, logprobs=logprobs))
        case PromptScores():
            out.prompt_scores.CopyFrom(pb.PromptScores(scores=[_logprob_to_proto(t) for t in event.scores]))
        case Progress():
            out.progress.CopyFrom(
                pb.Progress(
                    role=event.role,
                    worker=event.worker,
                    marks=event.marks,
                    cached_tokens=event.cached_tokens,
                    computed_tokens=event.computed_tokens,
                    transfer_bytes=event.transfer_bytes,
                    cached_by_tier=event.cached_by_tier,
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
        case Leaving():
            out.leaving.CopyFrom(pb.Leaving(started=event.started, withdrawn=event.withdrawn))
        case Paused():
            out.paused.CopyFrom(pb.Paused(position=event.position))
        case Resumed():
            out.resumed.CopyFrom(pb.Resumed(reason=event.reason))
        case Moved():
            out.moved.CopyFrom(pb.Moved(bytes=event.bytes))
        case Gives():
            out.gives.CopyFrom(pb.Gives(positions=event.positions))
        case Fetched():
            out.fetched.CopyFrom(pb.Moved(bytes=event.bytes))
        case Offered():
            out.offered.CopyFrom(pb.Offered(tokens=event.tokens, salt=event.salt))
        case Audited():
            out.audited.CopyFrom(_audited_to_proto(event))
    return out


def event_from_proto(m: pb.Event) -> Event:
    """Raises `UnknownKind`."""
    request_id, attempt = RequestId(m.request_id), m.attempt
    match m.WhichOneof("kind"):
        case "tokens":
            t = m.tokens
            logprobs = tuple(_logprob_from_proto(x) for x in t.logprobs)
            return Tokens(request_id, attempt, t.position, tuple(t.tokens), logprobs)
        case "prompt_scores":
            scores = tuple(_logprob_from_proto(x) for x in m.prompt_scores.scores)
            return PromptScores(request_id, attempt, scores)
        case "progress":
            p = m.progress
            return Progress(
                request_id,
                attempt,
                role_from_proto(p.role),
                WorkerName(p.worker),
                dict(p.marks),
                p.cached_tokens,
                p.computed_tokens,
                p.transfer_bytes,
                dict(p.cached_by_tier),
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
        case "leaving":
            return Leaving(request_id, attempt, m.leaving.started, m.leaving.withdrawn)
        case "paused":
            return Paused(request_id, attempt, m.paused.position)
        case "resumed":
            return Resumed(request_id, attempt, m.resumed.reason)
        case "moved":
            return Moved(request_id, attempt, m.moved.bytes)
        case "gives":
            return Gives(request_id, attempt, m.gives.positions)
        case "fetched":
            return Fetched(request_id, attempt, m.fetched.bytes)
        case "offered":
            return Offered(request_id, attempt, tuple(m.offered.tokens), m.offered.salt)
        case "audited":
            return _audited_from_proto(request_id, attempt, m.audited)
        case kind:
            raise UnknownKind(f"unknown event {kind!r}")


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
    )


def report_to_proto(r: CheckReport) -> pb.CheckReport:
    return pb.CheckReport(
        name=r.name, pages=r.pages, slots=r.slots, leases=r.leases, rooms=r.rooms, violations=r.violations
    )


def report_from_proto(m: pb.CheckReport) -> CheckReport:
    return CheckReport(WorkerName(m.name), m.pages, m.slots, m.leases, m.rooms, tuple(m.violations))


def fingerprint_to_proto(fingerprint: Fingerprint) -> pb.Fingerprint:
    return pb.Fingerprint(
        protocol=fingerprint.protocol,
        layout=fingerprint.layout,
        numerics=fingerprint.numerics,
        weights=fingerprint.weights,
    )


def fingerprint_from_proto(m: pb.Fingerprint) -> Fingerprint:
    return Fingerprint(m.protocol, m.layout, m.numerics, m.weights)
