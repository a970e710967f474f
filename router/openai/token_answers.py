"""Token ids in, token ids out: bodies of `/inference/v1/generate`, as vLLM has it, and their answers; and what answers
of all shapes say of a prompt's log-probabilities and of token counts.

Nothing here makes text or reads it, so a checkpoint without a tokenizer is served as any other. The parameters of
sampling stand in an object, `sampling_params`; a field that only shapes text is left out and named as ignored.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.compact_json import DATA, DONE, END, compact_json, sse_event
from twinpool.contracts.errors import RequestError
from twinpool.contracts.sampling_params import TokenLogprob
from twinpool.router.openai.api_errors import ApiError
from twinpool.router.openai.choice_output import ChoiceOutput, OutputDelta
from twinpool.router.openai.parse_request import (
    NO_ADAPTERS,
    Adapters,
    GenerateRequest,
    check_model,
    read_common,
    read_tokens,
)
from twinpool.router.openai.request_fields import (
    COMPLETION,
    MAX_IGNORED,
    TOKENS,
    RequestField,
    describe,
    ignored_field,
    object_of,
    or_null,
    read_fields,
    shaped,
)

_DRAWS = (
    "temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty seed min_tokens max_tokens "
    "ignore_eos n logprobs prompt_logprobs stop_token_ids allowed_token_ids logit_bias structured_outputs"
)
GENERATE_SAMPLING: dict[str, RequestField] = {name: COMPLETION[name] for name in _DRAWS.split()}
"""What stands within `sampling_params`."""
PIECE_BYTES = 48 * 1024
"""Of experts what is written at a time, before it is base64."""
GENERATE: dict[str, RequestField] = {
    **{
        name: COMPLETION[name]
        for name in [
            *("stream", "stream_options", "model", "cache_salt", "user", "priority", "timeout"),
            "return_routed_experts",
        ]
    },
    "token_ids": shaped({**TOKENS, "minItems": 1}),
    "sampling_params": shaped(object_of(**{name: or_null(field.schema) for name, field in GENERATE_SAMPLING.items()})),
}
"""The fields of `/inference/v1/generate`."""

_OF_TEXT = (
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "output_kind",
)
"""Parameters of vLLM's that shape text alone."""


def read_generate(body: Mapping[str, Any], spec: ModelSpec, adapters: Adapters = NO_ADAPTERS) -> GenerateRequest:
    """Read a body of `/inference/v1/generate`. `adapters`: those that are served.

    Raises `RequestError` naming the field that is wrong, `UnknownModel` for a model that isn't served.
    """
    adapter, params = check_model(body, spec, adapters), body.get("sampling_params")
    for name in body.keys() & GENERATE_SAMPLING.keys():
        if body[name] is not None:
            raise RequestError(f"{name} stands within sampling_params here", param=name)
    if params is not None and not isinstance(params, dict):
        raise RequestError(f"sampling_params must be an object; got {describe(params)}", param="sampling_params")
    inner = {name: value for name, value in (params or {}).items() if name not in _OF_TEXT}
    if inner.pop("stop", None) not in (None, "", []):
        raise RequestError("stop: nothing is made text here; use stop_token_ids", param="stop")
    values, ignored = read_fields(body, GENERATE)
    drawn, left_out = read_fields(inner, GENERATE_SAMPLING, "sampling_params.")
    of_text = tuple(ignored_field(f"sampling_params.{name}") for name in _OF_TEXT if name in (params or {}))
    tokens = read_tokens(body.get("token_ids"), spec, "token_ids")
    if not tokens:
        raise RequestError("token_ids is missing or empty", param="token_ids")
    flat = {name: body[name] for name in ("stream_options",) if name in body} | inner
    common = read_common(
        flat,
        {**values, **drawn},
        spec,
        {**GENERATE, **GENERATE_SAMPLING},
        (ignored + left_out + of_text)[:MAX_IGNORED],
        drawn.get("logprobs"),
        adapter,
    )
    return GenerateRequest(chat=False, shape="tokens", prompts=(tokens,), add_special_tokens=False, **common)


def finite(value: float) -> float:
    """Return `value`, or -9999 as OpenAI does for an infinite one, which JSON can't write."""
    return value if math.isfinite(value) else -9999.0


def usage_of(choices: Sequence[ChoiceOutput], n: int) -> dict[str, Any]:
    """Return the token counts so far. A prompt counts once, however many choices (`n`) it has."""
    firsts = choices[::n]
    prompt = sum(len(c.request.prompt) for c in firsts)
    completion = sum(len(c.tokens) for c in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(c.cached_tokens for c in firsts)},
    }


def prompt_logprobs(first: ChoiceOutput, best: int, text: Callable[[int], str | None]) -> list[dict[str, Any] | None]:
    """Return what vLLM calls `prompt_logprobs`: for each token of a prompt its log-probability and those of the `best`
    likeliest ones, by id; null for the first. `first`: the prompt's first choice. `text`: of a token.

    The rank of a token that isn't among the likeliest isn't known, and null.
    """
    found: list[dict[str, Any] | None] = [None]
    for scored in first.scores:
        values = dict([(scored.token, scored.logprob), *scored.top[:best]])
        ranks = {token: at for at, (token, _) in enumerate(scored.top, 1)}
        found.append(
            {
                str(token): {"logprob": finite(value), "rank": ranks.get(token), "decoded_token": text(token)}
                for token, value in values.items()
            }
        )
    return found


class ExpertsFile:
    """What vLLM calls `routed_experts`, base64 of a NumPy file: the experts of all positions of a choice but the last,
    which no step has computed, [positions, layers, top k] uint16. Tens of MB of a long answer, so it is made piece by
    piece, as it is sent: nobody else's tokens wait for all of it."""

    def __init__(self, first: ChoiceOutput, choice: ChoiceOutput) -> None:
        """`first`: the first choice of its prompt, which has the prompt's."""
        told = [one.experts for one in (*first.scores, *choice.logprobs)]
        top_k = next((one.top_k for one in told if one is not None), 1)
        self._ids = [one.ids for one in told if one is not None]
        size = sum(map(len, self._ids))
        shape = (len(told), size // (2 * top_k * len(told)), top_k) if told else (0, 0, top_k)
        assert 2 * math.prod(shape) == size, "every position has as many"
        file = io.BytesIO()
        np.lib.format.write_array_header_1_0(file, {"descr": "<u2", "fortran_order": False, "shape": shape})
        self._head = file.getvalue()
        self._size = 4 * -(-(len(self._head) + size) // 3)

    def __len__(self) -> int:
        """Its characters, each of a byte."""
        return self._size

    def __iter__(self) -> Iterator[bytes]:
        """The text, in pieces of about `PIECE_BYTES`."""
        raw = bytearray(self._head)
        for ids in self._ids:
            raw += ids
            if len(raw) >= PIECE_BYTES:
                whole = len(raw) - len(raw) % 3
                yield base64.b64encode(raw[:whole])
                del raw[:whole]
        yield base64.b64encode(raw)


def no_text(token: int) -> None:
    """The text of a token where none is made."""


class TokenWriter:
    """The writer of one answer in token ids, streamed or whole. Implements
    `router.openai.response_stream.AnswerWriter`."""

    def __init__(self, request: GenerateRequest, answer_id: str, created: int, model: str) -> None:
        self._request = request
        self._choices: list[ChoiceOutput] = []
        self._id, self._created, self._model = answer_id, created, model

    def bind(self, choices: list[ChoiceOutput]) -> None:
        """Set the choices; called once, before anything is written."""
        self._choices = choices

    def chunk(self, piece: OutputDelta) -> bytes:
        """Return the event of a delta; empty where it has neither tokens nor an end."""
        if not piece.tokens and piece.finish is None:
            return b""
        told: dict[str, Any] = {
            "request_id": self._id,
            "choices": [self._choice(piece.index, piece.tokens, piece.logprobs, piece.finish, piece.stop)],
        }
        if self._request.continuous_usage:
            told["usage"] = usage_of(self._choices, self._request.n)
        return f"{DATA}{compact_json(told)}{END}".encode()

    def closing(self, twinpool: object | None) -> bytes:
        """Return the end of a stream: an event with the usage and the timeline, where asked for, and ``[DONE]``."""
        told: dict[str, Any] = {"request_id": self._id, "choices": []}
        if self._request.include_usage:
            told["usage"] = usage_of(self._choices, self._request.n)
        if twinpool is not None:
            told["twinpool"] = twinpool
        if len(told) == 2:
            return sse_event(DONE)
        return f"{DATA}{compact_json(told)}{END}".encode() + sse_event(DONE)

    @staticmethod
    def failed(failure: ApiError) -> bytes:
        """Return the end of a stream that failed."""
        return sse_event(failure.to_json())

    def whole(self, twinpool: object | None) -> list[bytes | ExpertsFile]:
        """Return the body of an answer that isn't streamed, in parts to be sent one after another."""
        best = self._request.prompt_logprobs
        told = {"request_id": self._id, "model": self._model, "created": self._created}
        rest: dict[str, Any] = {
            "usage": usage_of(self._choices, self._request.n),
            "prompt_logprobs": None if best is None else prompt_logprobs(self._choices[0], best, no_text),
        }
        if twinpool is not None:
            rest["twinpool"] = twinpool
        parts: list[bytes | ExpertsFile] = [compact_json(told)[:-1].encode(), b',"choices":[']
        for number, c in enumerate(self._choices):
            shape = self._choice(c.index, c.tokens, c.logprobs, c.finish, c.stop)
            parts += [b"," * (number > 0), compact_json(shape)[:-1].encode()]
            if self._request.sampling.routed_experts:
                parts += [b',"routed_experts":"', ExpertsFile(self._choices[0], c), b'"']
            parts.append(b"}")
        return [*parts, b"],", compact_json(rest)[1:].encode()]

    def _choice(
        self,
        index: int,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob],
        finish: str | None,
        stop: str | int | None,
    ) -> dict[str, Any]:
        wanted = self._request.logprobs
        shown = None
        if wanted is not None:
            shown = {
                "content": [
                    {**_named(one.token, one.logprob), "top_logprobs": [_named(*best) for best in one.top[:wanted]]}
                    for one in logprobs
                ]
            }
        return {
            "index": index,
            "token_ids": list(tokens),
            "logprobs": shown,
            "finish_reason": finish,
            "stop_reason": stop,
        }


def _named(token: int, value: float) -> dict[str, Any]:
    """The log-probability of a token, as chats have it; tokens are named by their ids, as no text is made."""
    return {"token": f"token_id:{token}", "logprob": finite(value), "bytes": None}
