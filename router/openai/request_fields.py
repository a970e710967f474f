"""The fields of request bodies, each defined once: its JSON type and bounds or its shape, its meaning, its default, and
which fields of a request it sets. Bodies are read by these tables, and `/openapi.json` is made of them.

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
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from twinpool.contracts.errors import RequestError

INT64 = 2**63
MAX_TOKENS = 2**31 - 1
MAX_STOPS = 16
MAX_BIASES = 4096
MAX_CHOICES = 4096
MAX_TOOLS = 128
MAX_INPUTS = 2048
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

Schema = dict[str, Any]
"""A JSON schema."""


@dataclass(frozen=True, slots=True)
class RequestField:
    """One field of a request body: its JSON type `kind`, its meaning, and inclusive bounds."""

    kind: str
    """Empty: it is no plain value; it has a `shape`, which whoever reads it checks."""
    doc: str = ""
    low: float | None = None
    high: float | None = None
    above: bool = False
    """Whether `low` itself is excluded."""
    default: Any = None
    """What counts where the field isn't given."""
    sets: str = ""
    """The field of a `GenerateRequest` that it is; empty: the one of the same name, where there is one."""
    shape: Schema | None = None
    read: Callable[[Any], dict[str, Any]] | None = None
    """What makes fields of a chat of it, where another API has it."""

    @property
    def schema(self) -> Schema:
        """The JSON schema of its values."""
        if self.shape is not None:
            return self.shape
        bounds = {"exclusiveMinimum" if self.above else "minimum": self.low, "maximum": self.high}
        said = {"type": self.kind, "description": self.doc or None, **bounds}
        return {name: value for name, value in said.items() if value is not None}


_number, _integer = partial(RequestField, "number"), partial(RequestField, "integer")
_flag, _text = partial(RequestField, "boolean"), partial(RequestField, "string")


def shaped(schema: Schema, read: Callable[[Any], dict[str, Any]] | None = None) -> RequestField:
    """Return a field that is no plain value."""
    return RequestField("", shape=schema, read=read)


def object_of(required: str = "", /, **properties: Schema) -> Schema:
    return {"type": "object", "required": required.split(), "properties": properties}


def array_of(items: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": items, **bounds}


def one_of(*words: str) -> Schema:
    return {"enum": list(words)}


def text_or(*kinds: str) -> Schema:
    """A text, or parts with one."""
    return {"oneOf": [TEXT, array_of(object_of("type text", type=one_of(*kinds), text=TEXT))]}


def or_null(schema: Schema) -> Schema:
    """Null means that a field isn't given."""
    return schema if not schema.keys() - {"description"} else {"anyOf": [schema, {"type": "null"}]}


TEXT: Schema = {"type": "string"}
WORD: Schema = {"type": "string", "minLength": 1}
INTEGER: Schema = {"type": "integer"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
TOKENS = array_of({"type": "integer", "minimum": 0})

SAMPLING: dict[str, RequestField] = {
    "temperature": _number("0 is greedy.", 0, 100),
    "top_p": _number("Nucleus sampling; 0 keeps the best token alone.", 0, 1),
    "top_k": _integer("0 or -1: no limit.", -1, MAX_TOKENS),
    "min_p": _number("Least probability relative to the best token's.", 0, 1),
    "repetition_penalty": _number("Over prompt and answer.", 0, 100, above=True),
    "presence_penalty": _number("Over the answer.", -2, 2, default=0.0),
    "frequency_penalty": _number("Over the answer.", -2, 2, default=0.0),
    "seed": _integer("The same seed draws the same tokens.", -INT64, INT64 - 1),
    "min_tokens": _integer("No end before this many tokens.", 0, MAX_TOKENS, default=0),
    "max_tokens": _integer("Tokens to generate at most.", 0, MAX_TOKENS),
    "max_completion_tokens": _integer("As max_tokens; the one that counts if both are given.", 1, MAX_TOKENS),
    "ignore_eos": _flag("The model's end tokens don't end the answer."),
    "include_stop_str_in_output": _flag(
        "The stop string that matched stays in the text.", default=False, sets="include_stop"
    ),
    "skip_special_tokens": _flag("Special tokens have no text; default true.", default=True),
    "n": _integer("Answers a prompt.", 1, 128, default=1),
    "stream": _flag("Answer as server-sent events.", default=False),
    "return_token_ids": _flag("Add token_ids and prompt_token_ids; the stop token is among them.", default=False),
    "return_tokens_as_token_ids": _flag(
        "Log-probabilities name tokens token_id:N, which no two tokens share.", default=False, sets="tokens_as_ids"
    ),
    "add_special_tokens": _flag("The tokenizer adds its special tokens to text prompts.", default=True),
    "cache_salt": _text("Requests with different salts share no cached prefix.", default="", sets="salt"),
    "user": _text(
        "Names a session, of which router.policy=session sends all to one worker; else it does nothing.",
        default="",
        sets="session",
    ),
    "truncate_prompt_tokens": _integer(
        "Keep so many tokens of a prompt, its last; -1: as many as leave room for max_tokens.", -1, MAX_TOKENS
    ),
    "priority": _integer(
        "Higher stays longer in the caches, under cache.eviction=priority; default 0.", -INT64, INT64 - 1, default=0
    ),
    "timeout": _number("Seconds from its arrival until it ends with an error.", 0, 10**9, above=True, sets="timeout_s"),
}

_SCHEMA: Schema = {"oneOf": [OBJECT, TEXT], "description": "A JSON schema, or the text of one."}
_CHOICES = array_of(WORD, minItems=1, maxItems=MAX_CHOICES)
_REGEX: Schema = {**TEXT, "description": "A regular expression that the whole answer matches."}
_GRAMMAR: Schema = {**TEXT, "description": "A grammar, Lark's or GBNF."}
_SPACES: Schema = {**one_of(r"\s?", r"[ \n\t]*"), "description": "A regular expression of whitespace, as these are."}
_VLLMS: dict[str, Schema] = {
    "json": _SCHEMA, "json_object": BOOLEAN, "regex": _REGEX, "choice": _CHOICES, "grammar": _GRAMMAR
}  # fmt: skip
FORMATS = one_of("text", "json_object", "json_schema")
STRUCTURED_OUTPUT: dict[str, RequestField] = {
    "response_format": shaped(
        object_of("type", type=FORMATS, json_schema=object_of("schema", schema=_SCHEMA, name=TEXT, strict=BOOLEAN))
    ),
    "structured_outputs": shaped(object_of(**_VLLMS, disable_any_whitespace=BOOLEAN, whitespace_pattern=_SPACES)),
    **{f"guided_{name}": shaped(schema) for name, schema in _VLLMS.items()},
    "json_schema": shaped(_SCHEMA),
    "regex": shaped(_REGEX),
    "ebnf": shaped(_GRAMMAR),
    "guided_whitespace_pattern": shaped(_SPACES),
}
"""Fields that say what an answer must follow, one of them a request; `router.openai.structured_output` reads them."""

STREAM_OPTIONS: dict[str, RequestField] = {
    "include_usage": _flag("The last event has the usage.", default=False),
    "continuous_usage_stats": _flag("Every event has the usage so far.", default=False),
    "include_obfuscation": _flag("Ignored: nothing is added to events."),
}

MODEL = shaped({**TEXT, "description": "The served model; may be left out."})
BIAS = _number("", -100, 100)
OF_TEXT: dict[str, RequestField] = {
    **STRUCTURED_OUTPUT,
    "model": MODEL,
    "stop": shaped({"oneOf": [WORD, array_of(WORD, maxItems=MAX_STOPS)]}),
    "stop_token_ids": shaped(TOKENS),
    "allowed_token_ids": shaped({**TOKENS, "minItems": 1}),
    "logit_bias": shaped({**OBJECT, "maxProperties": MAX_BIASES, "additionalProperties": BIAS.schema}),
    "stream_options": shaped(object_of(**dict.fromkeys(STREAM_OPTIONS, BOOLEAN))),
}
"""Fields of all requests for text that aren't plain values; `router.openai.parse_request` reads them."""

FUNCTION: Schema = {
    "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"},
    "description": TEXT,
    "strict": {**BOOLEAN, "description": "Arguments follow the schema also with tool_choice auto."},
    "parameters": {**OBJECT, "description": "The JSON schema of the arguments, an object."},
}
EFFORT: Schema = {**one_of(*EFFORTS), "description": "Given to the chat template."}
PARALLEL = shaped({**BOOLEAN, "description": "Whether there may be several calls; default true."})
CHOICE_WORDS, ALLOWED_MODE = one_of("none", "auto", "required"), one_of("auto", "required")
_CALLED = {"type": {"const": "function"}, "function": object_of("name", name=WORD, arguments=TEXT)}
_TOOL = object_of("type function", type={"const": "function"}, function=object_of("name", **FUNCTION))
_NAMED_TOOL = object_of("type function", type={"const": "function"}, function=object_of("name", name=TEXT))
_ALLOWED = object_of("mode tools", mode=ALLOWED_MODE, tools=array_of(_NAMED_TOOL, minItems=1))
_ALLOWED_TOOLS = object_of("type allowed_tools", type={"const": "allowed_tools"}, allowed_tools=_ALLOWED)
_MESSAGE: Schema = {
    "role": WORD,
    "content": text_or("text"),
    **dict.fromkeys(("name", "reasoning_content"), TEXT),
    "tool_calls": array_of(object_of("function", id=TEXT, **_CALLED)),
    "tool_call_id": TEXT,
}
_WITH_CONTENT: Schema = {"anyOf": [{"required": ["content"]}, {"properties": {"role": {"const": "assistant"}}}]}
_OF_PROMPTS: dict[str, RequestField] = {
    "messages": shaped(array_of({**object_of("role", **_MESSAGE), **_WITH_CONTENT}, minItems=1)),
    "chat_template_kwargs": shaped({**OBJECT, "description": "Given to the chat template."}),
    "tools": shaped(array_of(_TOOL, maxItems=MAX_TOOLS)),
}

_PROMPT_LOGPROBS = _integer(
    "Log-probabilities of the prompt's tokens and of this many best ones; without stream.", 0, 20
)
COMPLETION: dict[str, RequestField] = {
    **SAMPLING,
    "echo": _flag("The prompt comes before the answer."),
    "logprobs": _integer("Log-probabilities of the tokens and of this many best ones.", 0, 20),
    "prompt_logprobs": _PROMPT_LOGPROBS,
    "return_routed_experts": _flag("Add routed_experts: those that tokens went to; without stream.", default=False),
    **OF_TEXT,
    "prompt": shaped({"oneOf": [TEXT, TOKENS, array_of({"oneOf": [TEXT, TOKENS]}, minItems=1)]}),
}
PLAIN_OF_CHATS: dict[str, RequestField] = {
    **SAMPLING,
    "max_tokens": replace(SAMPLING["max_tokens"], low=1),
    "add_special_tokens": replace(SAMPLING["add_special_tokens"], default=False),
    "logprobs": _flag("Log-probabilities of the tokens."),
    "top_logprobs": _integer("And of this many best ones; needs logprobs.", 0, 20),
    "add_generation_prompt": _flag("The template opens the assistant's turn; default true."),
    "continue_final_message": _flag("The answer goes on with the last message; the template opens no turn."),
    "separate_reasoning": _flag("Reasoning goes into reasoning_content; default true."),
}
CHAT: dict[str, RequestField] = {
    **PLAIN_OF_CHATS,
    "prompt_logprobs": _PROMPT_LOGPROBS,
    **OF_TEXT,
    **_OF_PROMPTS,
    "tool_choice": shaped({"oneOf": [CHOICE_WORDS, _NAMED_TOOL, _ALLOWED_TOOLS]}),
    "parallel_tool_calls": PARALLEL,
    "reasoning_effort": shaped(EFFORT),
}
TOKENIZE: dict[str, RequestField] = {
    "add_special_tokens": _flag("Default true for prompt, false for messages."),
    **dict.fromkeys(("add_generation_prompt", "continue_final_message"), _flag("As in chat.")),
    "return_token_strs": _flag("Add token_strs."),
    "model": MODEL,
    "prompt": shaped(TEXT),
    **_OF_PROMPTS,
}
EMBEDDINGS: dict[str, RequestField] = {
    **{
        name: SAMPLING[name]
        for name in ["add_special_tokens", "cache_salt", "user", "truncate_prompt_tokens", "priority", "timeout"]
    },
    "dimensions": _integer("Keep so many dimensions, the first; the vector is normalised after that.", 1, MAX_TOKENS),
    "normalize": RequestField("boolean", "Bring vectors to length 1, or leave them; else as the checkpoint says."),
    "encoding_format": shaped({**one_of("float", "base64"), "description": "base64: of the float32s, little-endian."}),
    "model": MODEL,
    "input": shaped({"oneOf": [WORD, TOKENS, array_of({"oneOf": [WORD, TOKENS]}, minItems=1, maxItems=MAX_INPUTS)]}),
}
DETOKENIZE: dict[str, RequestField] = {"model": MODEL, "tokens": shaped(TOKENS)}
_ELSEWHERE = frozenset({*COMPLETION, *CHAT, *EMBEDDINGS, *TOKENIZE, *DETOKENIZE})
"""Fields of all endpoints: where one doesn't exist, an empty value (`_EMPTY`) of it asks for nothing."""

IGNORED: dict[str, str] = {
    name: why
    for names, why in (
        (
            "safety_identifier metadata store prompt_cache_key prompt_cache_retention prompt_cache_options",
            "names the client, or what to keep for it: nothing is kept",
        ),
        ("request_id rid", "names the request; the header X-Request-Id does"),
        (
            "service_tier data_parallel_rank routed_dp_rank data_parallel_rank_decode",
            "says where to run; the router decides",
        ),
        ("length_penalty early_stopping", "belongs to beam search, which is refused"),
        ("guided_decoding_backend", "says which engine makes the masks; there is one"),
        (
            "mm_processor_kwargs media_io_kwargs use_audio_in_video max_dynamic_patch min_dynamic_patch",
            "belongs to images and sound, which are refused",
        ),
        ("stream_reasoning", "reasoning is streamed as it comes"),
        ("spaces_between_special_tokens", "belongs to slow tokenizers"),
        ("log_metrics no_logs", "says what to log"),
    )
    for name in names.split()
}
"""Known fields that can't change the answer here, with the reason."""

_EMPTY: tuple[object, ...] = (False, [], {}, "")


def _is_one_of(value: object, others: Sequence[object]) -> bool:
    """Whether a value is among others: ``false`` isn't 0, and 1 isn't ``1.0``."""
    return any(type(value) is type(other) and value == other for other in others)


class FieldRefusal(NamedTuple):
    """Why a field is refused, and its `neutral` values, which ask for nothing and are accepted."""

    why: str
    neutral: tuple[object, ...] = ()


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
    **_refuse("use prompt_logprobs", "logprob_start_len return_prompt_logprobs", False),
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
    **_refuse("an adapter is named by model", "lora_path lora_name lora_request lora adapter", ""),
    **_refuse("sessions are not supported; send the whole conversation", "session_params session_id", {}, ""),
    **_refuse("use cache_salt", "extra_key", ""),
    **_refuse(
        "the router pairs prefill and decode itself",
        "kv_transfer_params bootstrap_host bootstrap_port bootstrap_room disagg_prefill_dp_rank",
        {},
    ),
    **_refuse(
        "prompts are text or token ids",
        "prompt_embeds input_embeds image_data audio_data video_data multi_modal_data features",
        [],
        {},
    ),
    **_refuse("use prompt", "text input_ids prompt_token_ids inputs", ""),
    **_refuse("the parameters stand beside the prompt, not in an object", "sampling_params parameters", {}),
    **_refuse(
        "the model's inside isn't answered",
        "return_hidden_states return_meta_info return_cached_tokens_details return_prompt_token_ids",
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


def describe(value: object) -> str:
    """Return `value` as JSON for an error message, 60 characters at most."""
    if isinstance(value, list | tuple | dict | str) and len(value) > 60:  # A large value isn't serialised as a whole.
        value = dict(itertools.islice(value.items(), 60)) if isinstance(value, dict) else value[:60]
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


class FieldValues(NamedTuple):
    """What a body's plain fields say."""

    values: dict[str, Any]
    """By name, the checked values of fields that are in the endpoint's table and given, and defaults of others."""
    ignored: tuple[str, ...]
    """What was left out though it asks for something, as `ignored_field` writes it: `MAX_IGNORED`."""


MAX_IGNORED = 16
"""Fields that are named as ignored, of one body."""


def read_fields(body: Mapping[str, Any], fields: Mapping[str, RequestField], prefix: str = "") -> FieldValues:
    """Return the checked values of all plain fields in the table `fields`, and what is ignored.

    `prefix`: stands before names where the object is a field itself. Raises `RequestError` naming a field that is wrong
    or refused.
    """
    values = {name: field.default for name, field in fields.items() if field.default is not None}
    ignored: list[str] = []
    for name, value in body.items():
        if value is None:
            continue
        field = fields.get(name)
        if field is not None:
            if field.kind:
                values[name] = check_value(name, value, field)
        elif name != "model":
            if name not in IGNORED:
                _check_refused(name, value)
            if _asks(name, value) and len(ignored) < MAX_IGNORED:
                ignored.append(ignored_field(prefix + name, tuple(fields) if name not in IGNORED else ()))
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
    return not _is_one_of(value, _EMPTY) and name not in REFUSED


def _check_refused(name: str, value: object) -> None:
    """Raise `RequestError` for a field that would change the answer."""
    refusal = REFUSED.get(name)
    if refusal is not None:
        if not _is_one_of(value, refusal.neutral):
            raise RequestError(f"{name}: {refusal.why}", param=name)
    elif name in _ELSEWHERE and not _is_one_of(value, _EMPTY):
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


def _is_within(value: float, field: RequestField) -> bool:
    over = field.high is not None and value > field.high
    return not over and (field.low is None or value > field.low or (value == field.low and not field.above))


def _bounds(field: RequestField) -> str:
    if field.low is None or field.high is None:
        return ""
    return f" {'above' if field.above else 'from'} {field.low} {'and at most' if field.above else 'to'} {field.high}"
