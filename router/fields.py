"""The fields of a request body, as tables: kind, range, default and meaning of each; `openapi.json` is made of them.

Reading is strict: ``"5"`` is no number, ``true`` is no number, NaN is no number. ``null`` means "not given", as in
OpenAI's API. Fields that aren't in any table are ignored, as OpenAI does, except those in `REFUSED`: they would change
the answer, so to ignore them would be to answer another question.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contracts.errors import RequestError

INT64 = 2**63
MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Field:
    """One field: JSON type `kind`, bounds (inclusive), and what it means."""

    kind: str
    low: float | None = None
    high: float | None = None
    doc: str = ""
    above: bool = False
    """`low` itself is excluded."""


SAMPLING: dict[str, Field] = {
    "temperature": Field("number", 0, 100, "0 is greedy."),
    "top_p": Field("number", 0, 1, "Nucleus sampling.", above=True),
    "top_k": Field("integer", -1, MOST_TOKENS, "0 or -1: no limit."),
    "min_p": Field("number", 0, 1, "Least probability relative to the best token's."),
    "repetition_penalty": Field("number", 0, 100, "Over prompt and answer.", above=True),
    "presence_penalty": Field("number", -2, 2, "Over the answer."),
    "frequency_penalty": Field("number", -2, 2, "Over the answer."),
    "seed": Field("integer", -INT64, INT64 - 1, "The same seed draws the same tokens."),
    "min_tokens": Field("integer", 0, MOST_TOKENS, "No end before this many tokens."),
    "max_tokens": Field("integer", 0, MOST_TOKENS, "Tokens to generate at most."),
    "ignore_eos": Field("boolean", doc="The model's end tokens don't end the answer."),
    "include_stop_str_in_output": Field("boolean", doc="The stop string that matched stays in the text."),
    "skip_special_tokens": Field("boolean", doc="Special tokens have no text; default true."),
    "n": Field("integer", 1, 128, "Answers a prompt."),
    "stream": Field("boolean", doc="Answer as server-sent events."),
    "return_token_ids": Field("boolean", doc="Add token_ids and prompt_token_ids; the stop token is among them."),
    "add_special_tokens": Field("boolean", doc="The tokenizer adds its special tokens to text prompts."),
    "cache_salt": Field("string", doc="Requests with different salts share no cached prefix."),
    "priority": Field(
        "integer", -INT64, INT64 - 1, "Higher stays longer in the caches, under cache.eviction=priority; default 0."
    ),
    "timeout": Field("number", 0, doc="Seconds from its arrival until it ends with an error.", above=True),
    "user": Field("string", doc="Ignored."),
}

COMPLETION: dict[str, Field] = {
    **SAMPLING,
    "echo": Field("boolean", doc="The prompt comes before the answer."),
    "logprobs": Field("integer", 0, 20, "Log-probabilities of the tokens and of this many best ones."),
    "best_of": Field("integer", 1, 1, "Only 1."),
}

CHAT: dict[str, Field] = {
    **SAMPLING,
    "max_tokens": Field("integer", 1, MOST_TOKENS, "Tokens to generate at most."),
    "max_completion_tokens": Field("integer", 1, MOST_TOKENS, "As max_tokens; the one that counts if both are given."),
    "logprobs": Field("boolean", doc="Log-probabilities of the tokens."),
    "top_logprobs": Field("integer", 0, 20, "And of this many best ones; needs logprobs."),
    "add_generation_prompt": Field("boolean", doc="The template opens the assistant's turn; default true."),
}

TOKENIZE: dict[str, Field] = {
    "add_special_tokens": Field("boolean", doc="Default true for prompt, false for messages."),
    "add_generation_prompt": Field("boolean", doc="As in chat."),
    "return_token_strs": Field("boolean", doc="Add token_strs."),
}

REFUSED: dict[str, str] = {
    "suffix": "insertion (suffix) is not supported",
    "functions": "functions are not supported",
    "function_call": "functions are not supported",
    "prediction": "predicted outputs are not supported",
    "audio": "audio is not supported",
    "chat_template": "chat templates come from the checkpoint only",
    "guided_json": "constrained output is not supported",
    "guided_regex": "constrained output is not supported",
    "guided_choice": "constrained output is not supported",
    "guided_grammar": "constrained output is not supported",
    "structured_outputs": "constrained output is not supported",
    "continue_final_message": "continuing the last message is not supported",
    "use_beam_search": "beam search is not supported",
    "bad_words": "bad_words is not supported; use logit_bias",
    "allowed_token_ids": "allowed_token_ids is not supported; use logit_bias",
    "truncate_prompt_tokens": "prompts are not truncated; shorten the prompt",
    "prompt_logprobs": "prompt_logprobs is not supported; use /v1/completions with echo and logprobs",
    "logits_processors": "logits processors are not supported",
}

_NAMES = {"integer": "an integer", "number": "a number", "boolean": "true or false", "string": "a string"}


def read_json(body: bytes) -> dict[str, Any]:
    """The request body as an object. Raises `RequestError` for anything that isn't strict JSON, or no object."""
    try:
        tree = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"the body is not valid JSON: {reason}") from None
    if not isinstance(tree, dict):
        raise RequestError(f"the body must be a JSON object, not {describe(tree)}")
    return tree


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def describe(value: object) -> str:
    """`value` for an error message, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def read_fields(body: Mapping[str, Any], fields: Mapping[str, Field]) -> dict[str, Any]:
    """The given fields that are in the table, checked. Raises `RequestError` naming the field."""
    values: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        field = fields.get(name)
        if field is not None:
            values[name] = check_value(name, value, field)
        elif name in REFUSED and value not in (False, [], {}, ""):
            raise RequestError(REFUSED[name], param=name)
    return values


def check_value(name: str, value: object, field: Field) -> Any:
    """`value` if it is of the field's kind and within its bounds."""
    good = {
        "integer": type(value) is int,
        "number": type(value) in (int, float),
        "boolean": type(value) is bool,
        "string": type(value) is str,
    }[field.kind]
    if not good:
        raise RequestError(f"{name} must be {_NAMES[field.kind]}; got {describe(value)}", param=name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = field.low, field.high
        under = low is not None and (value < low or (field.above and value == low))
        if under or (high is not None and value > high) or not math.isfinite(value):
            raise RequestError(f"{name} must be {_bounds(field)}; got {describe(value)}", param=name)
    return value


def _bounds(field: Field) -> str:
    if field.low == field.high:
        return f"{field.low:g}"
    if field.high is None:
        return f"above {field.low:g}" if field.above else f"{field.low:g} or more"
    if field.high == MOST_TOKENS:
        return f"{field.low:g} or more"
    if field.kind == "integer" and field.high == INT64 - 1:
        return "a 64-bit integer"
    return f"{'above' if field.above else 'from'} {field.low:g} {'and at most' if field.above else 'to'} {field.high:g}"
