"""The router's commands to protobuf and back.

Builds of two versions meet while a cluster is upgraded. Unknown fields are skipped by protobuf itself, messages of
unknown kinds by `contracts.wire.unknown_kinds.known`, and an error of an unknown kind counts as `ErrorKind.WORKER`.
"""

from __future__ import annotations

from twinpool.contracts.errors import UnknownKind
from twinpool.contracts.ids import Incarnation, RequestId, RoomId, WorkerName
from twinpool.contracts.key_file import TENANT_CHARS
from twinpool.contracts.messages.kept_answers import Attach, Detach
from twinpool.contracts.messages.router_commands import (
    Audit,
    Cancel,
    Command,
    InvalidatePrefix,
    PauseForMigration,
    PeerRef,
    PullPrefix,
    PushPrefix,
    ResumeHere,
    Submit,
)
from twinpool.contracts.proto import worker_pb2 as pb
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.contracts.wire.kept_protobuf import attach_from_proto, attach_to_proto, name_from_proto, name_to_proto


def command_to_proto(command: Command) -> pb.Command:
    match command:
        case Submit():
            return pb.Command(submit=_submit_to_proto(command))
        case Cancel():
            rid, attempt, keep = command.request_id, command.attempt, command.keep
            return pb.Command(cancel=pb.Cancel(request_id=rid, attempt=attempt, keep=keep))
        case Detach():
            return pb.Command(detach=pb.Attempt(request_id=command.request_id, attempt=command.attempt))
        case Attach():
            return pb.Command(attach=attach_to_proto(command))
        case PauseForMigration():
            rid, peer = command.request_id, _peer_to_proto(command.peer)
            return pb.Command(
                pause_for_migration=pb.PauseForMigration(
                    request_id=rid, attempt=command.attempt, room=command.room, peer=peer
                )
            )
        case ResumeHere():
            return pb.Command(resume_here=pb.Attempt(request_id=command.request_id, attempt=command.attempt))
        case PushPrefix():
            return pb.Command(push_prefix=_pages_to_proto(command))
        case PullPrefix():
            return pb.Command(pull_prefix=_pages_to_proto(command))
        case Audit():
            return pb.Command(audit=_audit_to_proto(command))
        case InvalidatePrefix():
            forget = pb.InvalidatePrefix(request_id=command.request_id, tokens=command.tokens, salt=command.salt)
            return pb.Command(invalidate_prefix=forget)


def _pages_to_proto(c: PushPrefix | PullPrefix) -> pb.PrefixTransfer:
    return pb.PrefixTransfer(
        request_id=c.request_id,
        attempt=c.attempt,
        room=c.room,
        peer=_peer_to_proto(c.peer),
        tokens=c.tokens,
        salt=c.salt,
        spare=isinstance(c, PullPrefix) and c.spare,
    )


def command_from_proto(message: pb.Command) -> Command:
    """A command from the wire. Raises `UnknownKind` for a kind that this build doesn't know."""
    match message.WhichOneof("kind"):
        case "submit":
            return _submit_from_proto(message.submit)
        case "cancel":
            return Cancel(RequestId(message.cancel.request_id), message.cancel.attempt, message.cancel.keep)
        case "detach":
            return Detach(RequestId(message.detach.request_id), message.detach.attempt)
        case "attach":
            return attach_from_proto(message.attach)
        case "pause_for_migration":
            h = message.pause_for_migration
            return PauseForMigration(RequestId(h.request_id), h.attempt, RoomId(h.room), _peer_from_proto(h.peer))
        case "push_prefix":
            g = message.push_prefix
            ids = RequestId(g.request_id), g.attempt, RoomId(g.room), _peer_from_proto(g.peer)
            return PushPrefix(*ids, tuple(g.tokens), g.salt)
        case "pull_prefix":
            f = message.pull_prefix
            ids = RequestId(f.request_id), f.attempt, RoomId(f.room), _peer_from_proto(f.peer)
            return PullPrefix(*ids, tuple(f.tokens), f.salt, f.spare)
        case "resume_here":
            return ResumeHere(RequestId(message.resume_here.request_id), message.resume_here.attempt)
        case "audit":
            return _audit_from_proto(message.audit)
        case "invalidate_prefix":
            old = message.invalidate_prefix
            return InvalidatePrefix(RequestId(old.request_id), tuple(old.tokens), old.salt)
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
        first_token_s=s.first_token_s,
        migrating=s.migrating,
        tenant=s.tenant,
        weight=s.weight,
        name=name_to_proto(s.name),
    )


def _submit_from_proto(m: pb.Submit) -> Submit:
    """Raises `ValueError` for a tenant with a name that is too long to be one."""
    if len(m.tenant) > TENANT_CHARS:
        raise ValueError(f"a tenant's name has at most {TENANT_CHARS} characters; got {len(m.tenant)}")
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
        first_token_s=m.first_token_s,
        migrating=m.migrating,
        tenant=m.tenant,
        weight=m.weight if m.HasField("weight") else 1,  # Routers of older builds say nothing of it.
        name=name_from_proto(m.name) if m.HasField("name") else None,
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
        allowed_token_ids=s.allowed_token_ids,
        grammar=s.grammar,
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
        allowed_token_ids=tuple(m.allowed_token_ids),
        grammar=m.grammar,
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
