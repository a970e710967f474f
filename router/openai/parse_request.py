"""Parsing of the JSON bodies of `/v1/completions` and `/v1/chat/completions` into one checked `GenerateRequest`.

All checks that need no tokenizer are made here; lengths are checked once the prompt has been tokenised
(`router.tokenizer_pool.prepare_request`, `router.service.router_service`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.errors import RequestError
from twinpool.contracts.sampling_params import AdapterRef, SamplingParams
from twinpool.router.openai.chat_format import AnswerFormat
from twinpool.router.openai.request_fields import (
    BIAS,
    CHAT,
    COMPLETION,
    EFFORTS,
    MAX_BIASES,
    MAX_STOPS,
    STREAM_OPTIONS,
    RequestField,
    check_value,
    describe,
    read_fields,
)
from twinpool.router.openai.structured_output import RequestedGrammar, read_grammar
from twinpool.router.openai.tools import ToolUse, read_calls, read_tools
from twinpool.router.text.chat_template import PicturePart, TextParts

Prompt = str | tuple[int, ...]
ChatMessages = tuple[dict[str, Any], ...]
AnswerShape = Literal["openai", "anthropic", "responses", "tokens"]
"""Whose answers an answer looks like: those of OpenAI's completions and chats, of Anthropic's Messages API, of OpenAI's
Responses API, or those without text (`router.openai.token_answers`)."""
Activation = Literal["", "softmax", "sigmoid", "none"]
Adapters = Mapping[str, AdapterRef]
"""The adapters that are served, by the name that a request's `model` has."""
NO_ADAPTERS: Adapters = {}
MAX_NAMED = 8
"""Adapters that an error names at most."""


@dataclass(frozen=True, slots=True)
class PairFormat:
    """What is made of vectors of which two make a score."""

    kind: Literal["score", "rerank"]
    places: tuple[tuple[int, int], ...] = ()
    """By pair, its two prompts."""
    yes_at: int | None = None
    """Where a prompt's vector is two logits, which of them is for the pair; None: it isn't."""
    top_n: int | None = None
    """How many of the best are answered; None: all."""
    documents: tuple[str, ...] = ()
    """The texts, where they are answered."""


@dataclass(frozen=True, slots=True)
class EmbeddingFormat:
    """What is made of the embeddings of a request's prompts."""

    field: str = "input"
    """The field that has the prompts."""
    dimensions: int | None = None
    """How many of the first dimensions are kept; None: all."""
    base64: bool = False
    """Whether vectors are answered as the base64 of their float32s, else as numbers."""
    normalise: bool = True
    """Whether vectors have length 1."""
    pairs: PairFormat | None = None
    """Where scores are asked for instead."""
    labels: tuple[str, ...] = ()
    """The classes, where they are asked for instead."""
    activation: Activation = ""
    """What is made of vectors that are logits of classes; empty: they are embeddings, or the two logits of a pair."""


class UnknownModel(RequestError):
    """Raised when a request names a model that isn't served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One HTTP request for text: a chat, or one or more prompts with `n` choices each.

    Without `max_tokens` a chat takes what is left of the context, a completion `router.default_max_tokens` of it.
    """

    chat: bool
    embedding: EmbeddingFormat | None = None
    """How vectors are answered, where embeddings are asked for instead of text."""
    shape: AnswerShape = "openai"
    repeated: str = ""
    """The fields of the body that an answer in the shape ``responses`` repeats, as JSON; empty for others."""
    prompts: tuple[Prompt, ...] = ()
    messages: ChatMessages = ()
    template_args: dict[str, Any] = field(default_factory=dict)
    tool_use: ToolUse | None = None
    """The tools that a chat may use."""
    tool_named: bool = False
    """Whether the request names the tool that a chat is to call."""
    answer_format: AnswerFormat | None = None
    """What is to be found in a chat's answers; known once its prompt is rendered."""
    separate_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    truncate_prompt_tokens: int | None = None
    """How many tokens of a prompt are kept, the last; -1: as many as leave room for the answer; None: all."""
    n: int
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    """Whether log-probabilities name tokens by their ids."""
    add_special_tokens: bool
    skip_special_tokens: bool = True
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    max_tokens: int | None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    """How many of the likeliest tokens stand beside each of the prompt's, where asked for by this name; else None."""
    sampling: SamplingParams
    """The sampling parameters of all choices; `max_tokens` and `choice` are set for each choice at admission."""
    seeded: bool
    """Whether the client gave the seed; else it is random."""
    grammar_field: str = ""
    """The field that asks for `sampling.grammar`; empty where none does."""
    eos: frozenset[int] = frozenset()
    salt: str
    session: str
    """What the client names the conversation; empty where it doesn't."""
    priority: int
    timeout_s: float | None = None
    """Seconds from the request's arrival to its deadline; None takes the server's default."""
    ignored: tuple[str, ...] = ()
    """The fields of the body that have no effect, as `router.openai.request_fields` writes them."""

    @property
    def model_name(self) -> str:
        """The name of its adapter; empty where it has none."""
        return "" if self.sampling.adapter is None else self.sampling.adapter.name

    @property
    def choices(self) -> int:
        """The number of answers; choice `i` is of prompt ``i // n``."""
        return len(self.prompts) * self.n if not self.chat else self.n

    @property
    def prompt_field(self) -> str:
        """The field that has the prompt, for errors."""
        if self.embedding is not None:
            return self.embedding.field
        return "messages" if self.chat else "token_ids" if self.shape == "tokens" else "prompt"


def read_completion(body: Mapping[str, Any], spec: ModelSpec, adapters: Adapters = NO_ADAPTERS) -> GenerateRequest:
    """Read a body of `/v1/completions`. `adapters`: those that are served.

    Raises `RequestError` naming the field that is wrong, `UnknownModel` for a model that isn't served.
    """
    adapter = check_model(body, spec, adapters)
    values, ignored = read_fields(body, COMPLETION)
    prompts = read_prompts(body.get("prompt"), spec, "prompt")
    common = read_common(body, values, spec, COMPLETION, ignored, values.get("logprobs"), adapter)
    return GenerateRequest(chat=False, prompts=prompts, **common)


def read_chat(body: Mapping[str, Any], spec: ModelSpec, adapters: Adapters = NO_ADAPTERS) -> GenerateRequest:
    """Read a body of `/v1/chat/completions`; its prompt is rendered later. `adapters`: those that are served.

    Raises `RequestError` naming the field that is wrong, `UnknownModel` for a model that isn't served.
    """
    adapter = check_model(body, spec, adapters)
    values, ignored = read_fields(body, CHAT)
    if values.get("top_logprobs") and not values.get("logprobs"):
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    logprobs = values.get("top_logprobs", 0) if values.get("logprobs") else None
    messages, template_args, tool_use = read_messages(body.get("messages")), _template_args(body), read_tools(body)
    common = read_common(body, values, spec, CHAT, ignored, logprobs, adapter)
    return GenerateRequest(
        chat=True,
        messages=messages,
        template_args=template_args,
        tool_use=tool_use,
        tool_named=tool_use is not None and tool_use.named,
        **common,
    )


def check_model(body: Mapping[str, Any], spec: ModelSpec, adapters: Adapters = NO_ADAPTERS) -> AdapterRef | None:
    """Return the adapter that a body's `model` names; None where it names the model itself, or nothing.

    Raises `UnknownModel` for a model that isn't served, and `RequestError` where `model` is no string.
    """
    model = body.get("model")
    if model is None:
        return None
    if not isinstance(model, str):
        raise RequestError(f"model must be a string; got {describe(model)}", param="model")
    if model in spec.names:
        return None
    if model in adapters:
        return adapters[model]
    served = " and ".join(map(repr, spec.names))
    others = f"adapters (LoRA): {', '.join(list(adapters)[:MAX_NAMED])}" if adapters else "no adapters (LoRA)"
    message = f"the model {describe(model)} does not exist; this server has {served}, and {others}"
    raise UnknownModel(message, param="model")


def read_common(
    body: Mapping[str, Any],
    values: Mapping[str, Any],
    spec: ModelSpec,
    fields: Mapping[str, RequestField],
    ignored: tuple[str, ...],
    logprobs: int | None,
    adapter: AdapterRef | None,
) -> dict[str, Any]:
    """Return the fields of a `GenerateRequest` that chats, completions and token ids share."""
    options = _read_stream_options(body.get("stream_options"), values["stream"])
    max_tokens, min_tokens = values.get("max_completion_tokens", values.get("max_tokens")), values["min_tokens"]
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError(f"min_tokens {min_tokens} is above max_tokens {max_tokens}", param="min_tokens")
    if values.get("truncate_prompt_tokens") == 0:
        raise RequestError("truncate_prompt_tokens is 1 or more, or -1", param="truncate_prompt_tokens")
    grammar, asked = read_grammar(body), {fields[name].sets or name: value for name, value in values.items()}
    sampling = replace(_read_sampling(body, values, spec, grammar, logprobs), adapter=adapter)
    sampling = sampling.with_experts() if values.get("return_routed_experts") else sampling
    return {
        **{name: value for name, value in asked.items() if name in GenerateRequest.__annotations__},
        "include_usage": options.include_usage,
        "continuous_usage": options.continuous_usage,
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "sampling": sampling,
        "add_generation_prompt": opens_turn(values),
        "stops": _read_stops(body.get("stop")),
        "seeded": values.get("seed") is not None,
        "grammar_field": grammar.field,
        "eos": frozenset(spec.eos_token_ids),
        "ignored": ignored + options.ignored,
    }


def _read_sampling(
    body: Mapping[str, Any],
    values: Mapping[str, Any],
    spec: ModelSpec,
    grammar: RequestedGrammar,
    logprobs: int | None,
) -> SamplingParams:
    defaults = sampling_defaults(spec)
    stop_ids = read_tokens(body.get("stop_token_ids") or [], spec, "stop_token_ids")
    # Where a grammar is at its end nothing else may come than the end.
    ends = () if values.get("ignore_eos", False) and not grammar.text else spec.eos_token_ids
    allowed = _read_allowed(body.get("allowed_token_ids"), spec)
    if grammar.text:
        check_grammar_fits(spec, allowed, grammar.field)
    if values["min_tokens"]:
        if len({*stop_ids, *ends}) >= spec.vocab_size:
            raise RequestError(
                "min_tokens with stop_token_ids of the whole vocabulary leaves no token", param="min_tokens"
            )
        if allowed and not {*allowed} - {*stop_ids, *ends}:
            raise RequestError(
                "min_tokens with no allowed_token_ids but tokens that end the answer leaves no token",
                param="min_tokens",
            )
    seed = values.get("seed")
    top_p = float(values.get("top_p", defaults["top_p"]))
    top_k = max(0, int(values.get("top_k", defaults["top_k"])))
    if top_p == 0:  # The smallest nucleus is the best token alone.
        top_p, top_k = 1.0, 1
    return SamplingParams(
        max_tokens=0,
        temperature=float(values.get("temperature", defaults["temperature"])),
        top_p=top_p,
        top_k=top_k,
        min_p=float(values.get("min_p", defaults["min_p"])),
        repetition_penalty=float(values.get("repetition_penalty", defaults["repetition_penalty"])),
        presence_penalty=float(values["presence_penalty"]),
        frequency_penalty=float(values["frequency_penalty"]),
        logit_bias=_read_bias(body.get("logit_bias"), spec),
        allowed_token_ids=allowed,
        grammar=grammar.text,
        seed=secrets.randbits(64) if seed is None else seed & (2**64 - 1),
        min_tokens=values["min_tokens"],
        stop_token_ids=tuple(dict.fromkeys((*stop_ids, *ends))),
        logprobs=logprobs,
        prompt_logprobs=_scored(values, logprobs),
    )


def _scored(values: Mapping[str, Any], logprobs: int | None) -> int | None:
    """How many of the likeliest tokens are listed at each position of a prompt; None: no log-probabilities of it."""
    asked = [values.get("prompt_logprobs"), logprobs if values.get("echo") else None]
    for name in ("prompt_logprobs", "return_routed_experts"):
        if values["stream"] and name in values and values[name] is not False:
            raise RequestError(f"{name}: these come with a whole answer; leave stream out", param=name)
    return max((one for one in asked if one is not None), default=None)


_PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0.0, "min_p": 0.0, "repetition_penalty": 1.0}


def sampling_defaults(spec: ModelSpec) -> dict[str, float]:
    """Return what sampling parameters are where a request doesn't say."""
    return {**_PLAIN, **spec.generation_defaults}


def check_grammar_fits(spec: ModelSpec, allowed: tuple[int, ...], field: str) -> None:
    """Raise `RequestError` where an answer can't follow the grammar of `field`: of this model, or with
    `allowed_token_ids`."""
    if allowed:
        raise RequestError("allowed_token_ids can't be combined with structured output", param="allowed_token_ids")
    if not spec.eos_token_ids:
        message = "this model has no token that ends an answer, which structured output needs"
        raise RequestError(message, param=field)


def read_prompts(prompt: object, spec: ModelSpec, param: str) -> tuple[Prompt, ...]:
    """Return the prompts of the field `param`: texts and arrays of token ids. Raises `RequestError`."""
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt, list) and prompt:
        if type(prompt[0]) in (int, float):
            return (read_tokens(prompt, spec, param),)
        return tuple(p if isinstance(p, str) else read_tokens(p, spec, param) for p in prompt)
    if prompt is None or prompt == []:
        raise RequestError(f"{param} is missing or empty", param=param)
    raise RequestError(
        f"{param} must be a string, an array of token ids, or an array of either; got {describe(prompt)}", param=param
    )


def read_tokens(tokens: object, spec: ModelSpec, param: str) -> tuple[int, ...]:
    """Return an array of token ids as a tuple; `param` is the field's name for an error.

    Raises `RequestError` naming the first entry that is no token id of this model.
    """
    if not isinstance(tokens, list):
        raise RequestError(f"{param} must hold arrays of token ids; got {describe(tokens)}", param=param)
    if not all(type(t) is int for t in tokens):
        tokens = [int(t) if type(t) is float and t.is_integer() else t for t in tokens]
    if all(type(t) is int for t in tokens):
        if not tokens or (min(tokens) >= 0 and max(tokens) < spec.vocab_size):
            return tuple(tokens)
        bad = next(t for t in tokens if not 0 <= t < spec.vocab_size)
        raise RequestError(
            f"{param}: token id {describe(bad)} is out of range: the vocabulary has {spec.vocab_size} tokens",
            param=param,
        )
    bad = next(t for t in tokens if type(t) is not int)
    raise RequestError(f"{param}: token ids must be integers; got {describe(bad)}", param=param)


def _read_stops(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise RequestError(f"stop must be a string or an array of strings; got {describe(stop)}", param="stop")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop takes at most {MAX_STOPS} strings; got {len(stops)}", param="stop")
    if any(not s or len(s) > 1024 for s in stops):
        raise RequestError("a stop string has 1 to 1024 characters", param="stop")
    return tuple(stops)


def _read_bias(bias: object, spec: ModelSpec) -> tuple[tuple[int, float], ...]:
    if bias is None:
        return ()
    if not isinstance(bias, dict) or len(bias) > MAX_BIASES:
        raise RequestError(
            f"logit_bias must be an object of at most {MAX_BIASES} token ids and biases", param="logit_bias"
        )
    pairs = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise RequestError(f"logit_bias: {describe(key)} is not a token id", param="logit_bias")
        read_tokens([int(key)], spec, "logit_bias")
        check_value("logit_bias", value, BIAS)
        pairs[int(key)] = float(value)
    return tuple(sorted(pairs.items()))


def _read_allowed(tokens: object, spec: ModelSpec) -> tuple[int, ...]:
    if tokens is None:
        return ()
    if tokens == []:
        raise RequestError("allowed_token_ids must hold at least one token id", param="allowed_token_ids")
    return tuple(sorted(set(read_tokens(tokens, spec, "allowed_token_ids"))))


class _StreamOptions(NamedTuple):
    include_usage: bool = False
    continuous_usage: bool = False
    ignored: tuple[str, ...] = ()


def _read_stream_options(options: object, stream: bool) -> _StreamOptions:
    if options is None:
        return _StreamOptions()
    if not isinstance(options, dict):
        raise RequestError(f"stream_options must be an object; got {describe(options)}", param="stream_options")
    if not stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    values, ignored = read_fields(options, STREAM_OPTIONS, "stream_options.")
    continuous = values["continuous_usage_stats"]
    return _StreamOptions(values["include_usage"] or continuous, continuous, ignored)


def opens_turn(values: Mapping[str, Any]) -> bool:
    """Whether the template opens the assistant's turn. Raises `RequestError` where that is asked for and the last
    message is to be continued."""
    continues, opens = values.get("continue_final_message", False), values.get("add_generation_prompt")
    if continues and opens:
        raise RequestError(
            "add_generation_prompt opens a turn, and continue_final_message goes on with one: leave one of them out",
            param="continue_final_message",
        )
    return not continues if opens is None else bool(opens)


def read_messages(messages: object) -> ChatMessages:
    """Return the chat's messages, each with its content as one string: parts of type text are joined by line breaks,
    and stay parts for templates that take them (`TextParts`).

    Raises `RequestError` for a message that isn't text.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be an array of at least one message", param="messages")
    return tuple(_read_message(m, f"messages[{i}]") for i, m in enumerate(messages))


def _read_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"{where} must be an object; got {describe(message)}", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role must be a string; got {describe(role)}", param="messages")
    if message.get("function_call"):
        raise RequestError(f"{where}.function_call: use tool_calls", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        content = TextParts([_read_part(p, f"{where}.content[{i}]") for i, p in enumerate(content)])
    if content is None and role == "assistant":
        content = ""
    if not isinstance(content, str):
        raise RequestError(f"{where}.content must be a string or parts of type text", param="messages")
    if message.get("tool_calls"):
        return {**message, "content": content, "tool_calls": read_calls(message["tool_calls"], where)}
    return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": content}


def _read_part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(part, dict) and kind == "image_url":
        told = part.get("image_url")
        url = told.get("url") if isinstance(told, dict) else told
        if not isinstance(url, str):
            raise RequestError(f"{where}.image_url.url must be a string; got {describe(url)}", param="messages")
        return PicturePart(url, where)
    raise RequestError(
        f"{where} must be a part of type text or image_url: audio and files are not taken; "
        f"got {describe(kind or part)}",
        param="messages",
    )


def _template_args(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a chat's template is given besides messages and tools."""
    effort = body.get("reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        raise RequestError(
            f"reasoning_effort is one of {', '.join(EFFORTS)}; got {describe(effort)}", param="reasoning_effort"
        )
    given = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return given | read_template_args(body.get("chat_template_kwargs"))


def read_template_args(args: object) -> dict[str, Any]:
    """Return `chat_template_kwargs`, empty if not given. Raises `RequestError` where it is no object."""
    if args is None:
        return {}
    if not isinstance(args, dict):
        raise RequestError("chat_template_kwargs must be an object", param="chat_template_kwargs")
    return args
