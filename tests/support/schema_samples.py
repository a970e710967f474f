"""Answers to schemas as a hostile model would write them, and schemas of others to try: the JSON Schema Test Suite."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema_rs
import numpy as np
from jsonschema import Draft7Validator, Draft202012Validator
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from twinpool.contracts.errors import RequestError
from twinpool.contracts.grammar import BOUNDS
from twinpool.router.openai.client_grammar import check_grammar
from twinpool.router.openai.structured_output import read_grammar

Schema = dict[str, Any]
SUITE = Path(__file__).parent / "json_schema_suite.jsonl"
"""The suite's schemas with the instances that are valid, a line each, as the source distribution of `jsonschema` 4.26.0
has them (json_schema_suite.LICENSE)."""
DRAFT7 = "http://json-schema.org/draft-07/schema#"
_SOON, _LATE = 40, 90
_ODD = b'\\"{[,/u0-'
_CLOSING = b'"}]'
_EXPONENT = re.compile(r"-?[0-9.]+[eE][-+]?[0-9]+")


class SuiteCase(NamedTuple):
    """A schema of the suite, and instances that fit it."""

    draft: str
    file: str
    name: str
    schema: Schema
    valid: list[Any]


def suite() -> Iterator[SuiteCase]:
    for line in SUITE.read_text().splitlines():
        case = SuiteCase(*json.loads(line))
        if case.draft == "draft7":
            case = case._replace(schema={"$schema": DRAFT7, **case.schema})
        yield case


@lru_cache(maxsize=1)
def byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def grammar_of(schema: Schema) -> str:
    """The grammar of a schema, as the router makes it. Raises `RequestError` where it refuses it."""
    grammar = read_grammar({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}).text
    if told := check_grammar(grammar):
        raise RequestError(told, param="response_format")
    return grammar


def written(grammar: str, seed: int, hints: str = "") -> str | None:
    """An answer of random bytes that the grammar allows, None where it didn't end: escapes and brackets more often with
    an odd seed, letters of `hints` with an even one, and what ends it after a while."""
    bounds: dict[str, Any] = {**BOUNDS, "verbose_errors": False}
    matcher = LLMatcher(byte_tokenizer(), grammar, limits=LLParserLimits(**bounds), log_level=0)
    rng, out = random.Random(seed), bytearray()
    assert not matcher.is_error(), matcher.get_error()
    liked = frozenset(_ODD if seed % 2 else hints.encode())
    for step in range(4 * _LATE):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = [int(token) for token in np.flatnonzero(np.unpackbits(mask, bitorder="little"))]
        end = byte_tokenizer().eos_token
        if matcher.is_accepting() and (
            allowed == [end] or not allowed or rng.random() < (0.25 if step < _SOON else 0.9)
        ):
            return out.decode()
        choices = [token for token in allowed if token != end]
        assert choices, f"{out.decode(errors='replace')!r} can't go on: {matcher.get_error()}"
        if step > _LATE and rng.random() < 0.8:
            closing = [token for token in choices if token in _CLOSING] or [t for t in choices if t in b",:"]
            choices = closing or choices
        elif rng.random() < 0.6:
            choices = [token for token in choices if token in liked] or choices
        out.append(rng.choice(choices))
        assert matcher.consume_token(out[-1]), matcher.get_error()
    return None


def accepts(grammar: str, value: Any) -> bool:
    """Whether a value, written without blanks, is a whole answer of a grammar."""
    matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0)
    tokens = list(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


def why_invalid(schema: Schema, answer: str, ecma: bool = False) -> str:
    """Why an answer doesn't fit a schema; empty where it does. Of a name that is there twice the last value counts to
    one reader and the first to another: it must fit for both. `ecma`: patterns are read as ECMA-262 has them, which
    only one of both validators does."""
    python = (Draft7Validator if schema.get("$schema") == DRAFT7 else Draft202012Validator)(schema)
    draft = jsonschema_rs.Draft7Validator if schema.get("$schema") == DRAFT7 else jsonschema_rs.Draft202012Validator
    asserts = "content" in json.dumps(schema)  # contentEncoding, an annotation, which the other one asserts.
    if any(abs(float(number)) == inf for number in _EXPONENT.findall(answer)):
        return ""  # No validator here has numbers beyond doubles.
    for value in (json.loads(answer), json.loads(answer, object_pairs_hook=lambda pairs: dict(reversed(pairs)))):
        told = None
        with suppress(ValueError):  # Some schemas are none to that one.
            told = next(draft(schema, validate_formats=True).iter_errors(value), None)
            if told is None and ecma:
                continue
        if told is not None and not asserts:
            return f"{answer!r}: {told.message}"
        error = None if ecma else next(python.iter_errors(value), None)
        if error is not None and error.validator != "multipleOf":  # Which that one computes with doubles.
            return f"{answer!r}: {error.message}"
    return ""
