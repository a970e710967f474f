"""Tables of the fields of a request body: JSON type, bounds and meaning of each; `/openapi.json` is made of them.

Reading is strict: ``"5"``, ``true`` and NaN are no numbers. ``null`` means "not given", as in OpenAI's API. An integer
may be written as ``10.0``, as JSON knows one kind of number.

A field in an endpoint's table has its effect. One in `REFUSED`, or of another endpoint's table, would change the
answer, so a request with one is refused by the field's name, with the reason and an alternative. Any other field is
left out, and the answer says so in a header: those in `IGNORED` can't change the answer here, whatever their value, and
one that nobody knows may be new in a client's next version, which mustn't end what worked.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from twinpool.contracts import outside_data
from twinpool.contracts.errors import RequestError

INT64 = 2**63
MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RequestField:
    """One field of a request body: its JSON type `kind`, inclusive bounds, and meaning (`doc`)."""

    kind: str
    low: float | None = None
    high: float | None = None
    doc: str = ""
    above: bool = False
    """Whether `low` itself is excluded."""


SAMPLING: dict[str, RequestField] = {
    "temperature": RequestField("number", 0, 100, "0 is greedy."),
    "top_p": RequestField("number", 0, 1, "Nucleus sampling; 0 keeps the best token alone."),
    "top_k": RequestField("integer", -1, MAX_TOKENS, "0 or -1: no limit."),
    "min_p": RequestField("number", 0, 1, "Least probability relative to the best token's."),
    "repetition_penalty": RequestField("number", 0, 100, "Over prompt and answer.", above=True),
    "presence_penalty": RequestField("number", -2, 2, "Over the answer."),
    "frequency_penalty": RequestField("number", -2, 2, "Over the answer."),
    "seed": RequestField("integer", -INT64, INT64 - 1, "The same seed draws the same tokens."),
    "min_tokens": RequestField("integer", 0, MAX_TOKENS, "No end before this many tokens."),
    "max_tokens": RequestField("integer", 0, MAX_TOKENS, "Tokens to generate at most."),
    "max_completion_tokens": RequestField(
        "integer", 1, MAX_TOKENS, "As max_tokens; the one that counts if both are given."
    ),
    "ignore_eos": RequestField("boolean", doc="The model's end tokens don't end the answer."),
    "include_stop_str_in_output": RequestField("boolean", doc="The stop string that matched stays in the text."),
    "skip_special_tokens": RequestField("boolean", doc="Special tokens have no text; default true."),
    "n": RequestField("integer", 1, 128, "Answers a prompt."),
    "stream": RequestField("boolean", doc="Answer as server-sent events."),
    "return_token_ids": RequestField(
        "boolean", doc="Add token_ids and prompt_token_ids; the stop token is among them."
    ),
    "return_tokens_as_token_ids": RequestField(
        "boolean", doc="Log-probabilities name tokens token_id:N, which no two tokens share."
    ),
    "add_special_tokens": RequestField("boolean", doc="The tokenizer adds its special tokens to text prompts."),
    "cache_salt": RequestField("string", doc="Requests with different salts share no cached prefix."),
    "user": RequestField(
        "string", doc="Names a session, of which router.policy=session sends all to one worker; else it does nothing."
    ),
    "truncate_prompt_tokens": RequestField(
        "integer",
        -1,
        MAX_TOKENS,
        "Keep so many tokens of a prompt, its last; -1: as many as leave room for max_tokens.",
    ),
    "priority": RequestField(
        "integer", -INT64, INT64 - 1, "Higher stays longer in the caches, under cache.eviction=priority; default 0."
    ),
    "timeout": RequestField("number", 0, 10**9, "Seconds from its arrival until it ends with an error.", above=True),
}

COMPLETION: dict[str, RequestField] = {
    **SAMPLING,
    "echo": RequestField("boolean", doc="The prompt comes before the answer."),
    "logprobs": RequestField("integer", 0, 20, "Log-probabilities of the tokens and of this many best ones."),
}

CHAT: dict[str, RequestField] = {
    **SAMPLING,
    "max_tokens": RequestField("integer", 1, MAX_TOKENS, "Tokens to generate at most."),
    "logprobs": RequestField("boolean", doc="Log-probabilities of the tokens."),
    "top_logprobs": RequestField("integer", 0, 20, "And of this many best ones; needs logprobs."),
    "add_generation_prompt": RequestField("boolean", doc="The template opens the assistant's turn; default true."),
    "continue_final_message": RequestField(
        "boolean", doc="The answer goes on with the last message; the template opens no turn."
    ),
    "separate_reasoning": RequestField("boolean", doc="Reasoning goes into reasoning_content; default true."),
}

TOKENIZE: dict[str, RequestField] = {
    "add_special_tokens": RequestField("boolean", doc="Default true for prompt, false for messages."),
    "add_generation_prompt": RequestField("boolean", doc="As in chat."),
    "continue_final_message": RequestField("boolean", doc="As in chat."),
    "return_token_strs": RequestField("boolean", doc="Add token_strs."),
}

TOKENIZE_OTHERS = ("prompt", "messages", "chat_template_kwargs", "tools")
"""Fields of `/tokenize` that aren't plain values."""

STREAM_OPTIONS: dict[str, RequestField] = {
    "include_usage": RequestField("boolean", doc="The last event has the usage."),
    "continuous_usage_stats": RequestField("boolean", doc="Every event has the usage so far."),
    "include_obfuscation": RequestField("boolean", doc="Ignored: nothing is added to events."),
}

DETOKENIZE: dict[str, RequestField] = {}

STRUCTURED_OUTPUT = (
    "response_format", "structured_outputs", "guided_json", "guided_json_object", "guided_regex", "guided_choice",
    "guided_grammar", "json_schema", "regex", "ebnf", "guided_whitespace_pattern",
)  # fmt: skip
"""Fields that say what an answer must follow; `router.openai.structured_output` reads them."""

GENERATE_OTHERS = (
    "model", "stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "stream_options", *STRUCTURED_OUTPUT
)  # fmt: skip
"""Fields of generation requests that aren't plain values; `router.openai.parse_request` reads them."""

CHAT_OTHERS = (
    "messages", "chat_template_kwargs", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"
)  # fmt: skip
"""Fields of chats that aren't plain values."""

IGNORED: dict[str, str] = {
    **dict.fromkeys(
        (
            "safety_identifier",
            "metadata",
            "store",
            "prompt_cache_key",
            "prompt_cache_retention",
            "prompt_cache_options",
        ),
        "names the client, or what to keep for it: nothing is kept",
    ),
    **dict.fromkeys(("request_id", "rid"), "names the request; the header X-Request-Id does"),
    **dict.fromkeys(
        ("service_tier", "data_parallel_rank", "routed_dp_rank", "data_parallel_rank_decode"),
        "says where to run; the router decides",
    ),
    **dict.fromkeys(("length_penalty", "early_stopping"), "belongs to beam search, which is refused"),
    "guided_decoding_backend": "says which engine makes the masks; there is one",
    **dict.fromkeys(
        ("mm_processor_kwargs", "media_io_kwargs", "use_audio_in_video", "max_dynamic_patch", "min_dynamic_patch"),
        "belongs to images and sound, which are refused",
    ),
    "stream_reasoning": "reasoning is streamed as it comes",
    "spaces_between_special_tokens": "belongs to slow tokenizers",
    "log_metrics": "says what to log",
    "no_logs": "says what to log",
}
"""Known fields that can't change the answer here, with the reason."""

_EMPTY: tuple[object, ...] = (False, [], {}, "")


@dataclass(frozen=True, slots=True)
class FieldRefusal:
    """Why a field is refused, and its `neutral` values, which ask for nothing and are accepted."""

    why: str
    neutral: tuple[object, ...] = ()

    def says_nothing(self, value: object) -> bool:
        return any(type(value) is type(n) and value == n for n in self.neutral)


def _refuse(why: str, names: str, *neutral: object) -> dict[str, FieldRefusal]:
    return dict.fromkeys(names.split(), FieldRefusal(why, neutral))


REFUSED: dict[str, FieldRefusal] = {
    **_refuse("insertion (suffix) is not supported", "suffix", ""),
    **_refuse("only chats can use tools", "tools", []),
    **_refuse("only chats can use tools", "tool_choice", "none", "auto"),
    **_refuse("only chats can use tools", "parallel_tool_calls", True, False),
    **_refuse("use tools", "functions", [], {}),
    **_refuse("use tool_choice", "function_call", "none", "auto"),
    **_refuse("structural tags are not supported; use response_format", "structural_tag"),
    **_refuse("use structured_outputs", "grammar choices"),
    **_refuse("nothing is moderated", "moderation", {}),
    **_refuse("predicted outputs are not supported", "prediction"),
    **_refuse("only text is answered", "audio modalities", ["text"]),
    **_refuse("web search is not supported", "web_search_options"),
    **_refuse("chat templates come from the checkpoint only", "chat_template"),
    **_refuse("documents are not supported; put their text into a message", "documents", []),
    **_refuse(
        "this is not passed on; give it in chat_template_kwargs if the checkpoint's template reads it",
        "reasoning_effort verbosity enable_thinking thinking reasoning",
    ),
    **_refuse("thinking isn't bounded; use max_tokens", "thinking_token_budget thinking_budget max_thinking_tokens"),
    **_refuse("reasoning is always told", "include_reasoning", True),
    **_refuse("reasoning isn't told from the answer", "require_reasoning", False),
    **_refuse("only 1 is supported; use n", "best_of", 1),
    **_refuse("beam search is not supported", "use_beam_search", False),
    **_refuse("bad_words is not supported; use logit_bias", "bad_words", []),
    **_refuse("logits processors are not supported", "logits_processors", []),
    **_refuse("logits processors are not supported", "custom_logit_processor custom_params vllm_xargs", {}),
    **_refuse("the end of prompts is what is kept", "truncation_side", "left"),
    **_refuse(
        "prompt_logprobs is not supported; use /v1/completions with echo and logprobs",
        "prompt_logprobs logprob_start_len return_prompt_logprobs",
        False,
    ),
    **_refuse(
        "use logprobs",
        "return_logprob top_logprobs_num token_ids_logprob logprob_token_ids return_text_in_logprobs",
        False,
        [],
    ),
    **_refuse("text is always made; token ids come with return_token_ids", "detokenize", True),
    **_refuse("stop takes strings, not patterns", "stop_regex", [], ""),
    **_refuse("use include_stop_str_in_output", "no_stop_trim", False),
    **_refuse("repetition isn't looked for; use repetition_penalty", "repetition_detection"),
    **_refuse(
        "adapters are not supported: there is one set of weights", "lora_path lora_name lora_request lora adapter", ""
    ),
    **_refuse("sessions are not supported; send the whole conversation", "session_params session_id", {}, ""),
    **_refuse("use cache_salt", "extra_key", ""),
    **_refuse(
        "the router pairs prefill and decode itself",
        "kv_transfer_params bootstrap_host bootstrap_port bootstrap_room disagg_prefill_dp_rank",
        {},
    ),
    **_refuse(
        "prompts are text or token ids",
        "prompt_embeds input_embeds image_data audio_data video_data multi_modal_data",
        [],
        {},
    ),
    **_refuse("use prompt", "text input_ids prompt_token_ids inputs", ""),
    **_refuse("the parameters stand beside the prompt, not in an object", "sampling_params parameters", {}),
    **_refuse(
        "the model's inside isn't answered",
        "return_hidden_states return_routed_experts return_meta_info return_cached_tokens_details "
        "return_prompt_token_ids",
        False,
    ),
    **_refuse("this sampler is not supported", "typical_p tfs tfs_z encoder_repetition_penalty", 1, 1.0),
    **_refuse(
        "this sampler is not supported",
        "top_a eta_cutoff epsilon_cutoff mirostat mirostat_mode dry_multiplier xtc_probability smoothing_factor "
        "dynatemp_min dynatemp_max no_repeat_ngram_size",
        0,
        0.0,
    ),
    **_refuse("only one beam is supported; use n", "num_beams", 1),
    **_refuse("use temperature 0 for the likeliest tokens", "do_sample", True),
    **_refuse(
        "this sampler is not supported",
        "mirostat_tau mirostat_eta dry_base dry_allowed_length dry_sequence_breakers xtc_threshold smoothing_curve "
        "dynatemp_exponent temperature_last nsigma top_n_sigma sampling_seed",
    ),
}

_NAMES = {"integer": "an integer", "number": "a number", "boolean": "true or false", "string": "a string"}


def read_json(body: bytes) -> dict[str, Any]:
    """Return the request body as an object. Raises `RequestError` for a body that isn't strict JSON, or no object.

    A number beyond all floats, or with more digits than Python reads, is infinite where it is a field's value, so that
    whoever reads the field refuses it with the field's range. Within a field it is refused here, with its place.
    """
    try:
        try:
            tree = outside_data.read_json(body, _JSON.read)
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise
        except ValueError:  # A number, most likely; this reading tells which.
            tree = outside_data.read_json(body, _JSON_WITH_INFINITIES.read)
            if (place := _infinite_within(tree)) is not None:
                message = f"{'.'.join(place)}: the number is too large to be read"
                raise RequestError(message, param=place[0]) from None
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise RequestError(f"the body must be a JSON object, not {describe(tree)}")
    return tree


class _JsonReader:
    """A reader of bodies, made once, as that takes as long as reading a short body."""

    def __init__(
        self, integer: Callable[[str], Any] | None = None, fraction: Callable[[str], Any] | None = None
    ) -> None:
        """What reads numbers; None: Python."""
        self._decoder = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=integer, parse_float=fraction)

    def read(self, body: Any) -> Any:
        return self._decoder.decode(body.decode(json.detect_encoding(body), "surrogatepass"))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is too large")
    return value


def _int_or_infinite(text: str) -> float:
    """Return a number of any length; Python refuses to read longer ones, which takes the square of their length."""
    return int(text) if len(text) <= sys.int_info.str_digits_check_threshold else float(text)


_JSON = _JsonReader(fraction=_finite)
_JSON_WITH_INFINITIES = _JsonReader(integer=_int_or_infinite)


def _infinite_within(tree: object) -> tuple[str, ...] | None:
    """Return the names and numbers that lead to an infinite number within a field of a body; None without one."""
    left: list[tuple[Any, _Place]] = [(tree, None)]
    while left:
        part, place = left.pop()
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            if isinstance(value, dict | list):
                left.append((value, (place, key)))
            elif place is not None and isinstance(value, float) and math.isinf(value):
                return _names((place, key))
    return None


_Place = tuple[Any, Any] | None
"""Where something is in a body: the place of what has it, and its name or number there; None: it is the body."""


def _names(place: _Place) -> tuple[str, ...]:
    names: list[str] = []
    while place is not None:
        place, key = place
        names.append(str(key)[:64])
    return tuple(reversed(names))


def describe(value: object) -> str:
    """Return `value` as JSON for an error message, 60 characters at most."""
    if isinstance(value, list | tuple | dict | str) and len(value) > 60:  # A large value isn't serialised as a whole.
        value = dict(itertools.islice(value.items(), 60)) if isinstance(value, dict) else value[:60]
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


class FieldValues(NamedTuple):
    """What a body's plain fields say."""

    values: dict[str, Any]
    """By name, the checked values of fields that are in the endpoint's table and given."""
    ignored: tuple[str, ...]
    """What was left out though it asks for something, as `ignored_field` writes it: `MAX_IGNORED`."""


MAX_IGNORED = 16
"""Fields that are named as ignored, of one body."""


def read_fields(
    body: Mapping[str, Any], fields: Mapping[str, RequestField], others: Collection[str] = (), prefix: str = ""
) -> FieldValues:
    """Return the checked values of all fields that are in the table `fields` and given, and what is ignored.

    `others`: fields of the same object that the caller reads itself. `prefix`: stands before its names where the object
    is a field itself. Raises `RequestError` naming a field that is wrong or refused.
    """
    values: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in body.items():
        if value is None:
            continue
        field = fields.get(name)
        if field is not None:
            values[name] = check_value(name, value, field)
        elif name not in others and name != "model":
            if name not in IGNORED:
                _check_refused(name, value)
            if _asks(name, value) and len(ignored) < MAX_IGNORED:
                ignored.append(ignored_field(prefix + name, (*fields, *others) if name not in IGNORED else ()))
    return FieldValues(values, tuple(ignored))


def ignored_field(name: str, known: Sequence[str] = ()) -> str:
    """Return an ignored field as the header has it: its name, with one of `known` that it may have been meant to be.

    What a client calls a field is cut to what a header may hold.
    """
    meant = difflib.get_close_matches(name[:64], known, 1, 0.8)
    return _UNSAFE.sub("?", name[:64]) + (f";meant={meant[0]}" if meant else "")


_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


def _asks(name: str, value: object) -> bool:
    """Whether a field that has no effect asks for something."""
    empty = any(type(value) is type(e) and value == e for e in _EMPTY)
    return not empty and name not in REFUSED


def _check_refused(name: str, value: object) -> None:
    """Raise `RequestError` for a field that would change the answer."""
    refusal = REFUSED.get(name)
    if refusal is not None:
        if not refusal.says_nothing(value):
            raise RequestError(f"{name}: {refusal.why}", param=name)
    elif name in _ELSEWHERE and not any(type(value) is type(e) and value == e for e in _EMPTY):
        raise RequestError(f"{name} is a field of other endpoints: leave it out", param=name)


def check_value(name: str, value: object, field: RequestField) -> Any:
    """Return `value` (as an int for integers), or raise `RequestError` where its type or bounds are wrong."""
    if field.kind == "integer" and type(value) is float and value.is_integer():
        value = int(value)
    good = {
        "integer": type(value) is int,
        "number": type(value) in (int, float),
        "boolean": type(value) is bool,
        "string": type(value) is str,
    }[field.kind]
    if not good or (isinstance(value, int | float) and not _is_within(value, field)):
        raise RequestError(f"{name} must be {_NAMES[field.kind]}{_bounds(field)}; got {describe(value)}", param=name)
    return value


_ELSEWHERE = frozenset({*COMPLETION, *CHAT, *TOKENIZE, "prompt", "messages", "tokens", *GENERATE_OTHERS, *CHAT_OTHERS})
"""Fields of all endpoints: where one doesn't exist, an empty value (`_EMPTY`) of it asks for nothing."""


def _is_within(value: float, field: RequestField) -> bool:
    over = field.high is not None and value > field.high
    return not over and (field.low is None or value > field.low or (value == field.low and not field.above))


def _bounds(field: RequestField) -> str:
    if field.low is None or field.high is None:
        return ""
    return f" {'above' if field.above else 'from'} {field.low} {'and at most' if field.above else 'to'} {field.high}"
