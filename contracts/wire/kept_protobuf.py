"""Kept answers, their names and log-probabilities to protobuf and back."""

from __future__ import annotations

from twinpool.contracts.ids import RequestId
from twinpool.contracts.messages.kept_answers import AnswerName, Attach, Attached, KeptAnswer
from twinpool.contracts.proto import worker_pb2 as pb
from twinpool.contracts.sampling_params import TokenLogprob


def logprob_to_proto(t: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token=t.token,
        logprob=t.logprob,
        top_tokens=[token for token, _ in t.top],
        top_logprobs=[value for _, value in t.top],
    )


def logprob_from_proto(m: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(m.token, m.logprob, tuple(zip(m.top_tokens, m.top_logprobs, strict=True)))


def name_to_proto(n: AnswerName | None) -> pb.AnswerName | None:
    if n is None:
        return None
    logprobs = [logprob_to_proto(t) for t in n.logprobs]
    return pb.AnswerName(
        key=n.key, body=n.body, index=n.index, created=n.created, cached_tokens=n.cached_tokens, logprobs=logprobs
    )


def name_from_proto(m: pb.AnswerName) -> AnswerName:
    cached = m.cached_tokens if m.HasField("cached_tokens") else None
    logprobs = tuple(logprob_from_proto(t) for t in m.logprobs)
    return AnswerName(m.key, m.body, m.index, m.created, cached, logprobs)


def attach_to_proto(a: Attach) -> pb.Attach:
    return pb.Attach(request_id=a.request_id, attempt=a.attempt, key=a.key, body=a.body, seen=a.seen)


def attach_from_proto(m: pb.Attach) -> Attach:
    seen = m.seen if m.HasField("seen") else None
    return Attach(RequestId(m.request_id), m.attempt, m.key, m.body, seen)


def attached_to_proto(a: Attached) -> pb.Attached:
    answers = [_kept_to_proto(k) for k in a.answers]
    return pb.Attached(other_body=a.other_body, answers=answers, contested=a.contested)


def attached_from_proto(request_id: RequestId, attempt: int, m: pb.Attached) -> Attached:
    answers = tuple(_kept_from_proto(k) for k in m.answers)
    return Attached(request_id, attempt, m.other_body, answers, m.contested)


def _kept_to_proto(k: KeptAnswer) -> pb.KeptAnswer:
    return pb.KeptAnswer(
        request_id=k.request_id,
        attempt=k.attempt,
        index=k.index,
        created=k.created,
        prompt_len=k.prompt_len,
        max_tokens=k.max_tokens,
        left_s=k.left_s,
        tokens=k.tokens,
        logprobs=[logprob_to_proto(t) for t in k.logprobs],
        cached_tokens=k.cached_tokens,
        running=k.running,
        started=k.started,
        reason=k.reason,
        stop_token=k.stop_token,
    )


def _kept_from_proto(m: pb.KeptAnswer) -> KeptAnswer:
    return KeptAnswer(
        request_id=RequestId(m.request_id),
        attempt=m.attempt,
        index=m.index,
        created=m.created,
        prompt_len=m.prompt_len,
        max_tokens=m.max_tokens,
        left_s=m.left_s,
        tokens=tuple(m.tokens),
        logprobs=tuple(logprob_from_proto(t) for t in m.logprobs),
        cached_tokens=m.cached_tokens if m.HasField("cached_tokens") else None,
        running=m.running,
        started=m.started,
        reason=m.reason,
        stop_token=m.stop_token if m.HasField("stop_token") else None,
    )
