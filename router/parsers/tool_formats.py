"""The ways in which models write calls of tools, by name: how each is read, and what a grammar of it is.

A checkpoint's chat template says which one its model was trained on; `router.tool_parser` overrides that. The parser
of calls in sections of marks, with arguments as JSON text (DeepSeek-V3 and V3.1, Kimi, Mistral), is here as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from twinpool.contracts.errors import RequestError
from twinpool.contracts.grammar import JSON_FORM
from twinpool.router.parsers import gemma_calls
from twinpool.router.parsers.answer_parts import (
    SPACE,
    AnswerPart,
    ArgumentsPart,
    CallPart,
    ContentAround,
    PartsParser,
    SteppedParser,
    cut_at,
    quoted,
)
from twinpool.router.parsers.element_calls import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    GLM_45,
    GLM_47,
    MINIMAX_M2,
    QWEN3_CODER,
    SEED_OSS,
    ElementCalls,
    ElementMarks,
    ParameterTypes,
)
from twinpool.router.parsers.gemma_calls import GemmaCalls, GemmaRules
from twinpool.router.parsers.harmony_messages import HARMONY_MARKS, HarmonyMessages, call_rules
from twinpool.router.parsers.json_calls import ArrayJsonCalls, TaggedJsonCalls, WholeJsonCalls


@dataclass(frozen=True, slots=True)
class SectionMarks:
    """How calls are written: `call` name `arguments` JSON `call_end`, all of them between the two of `around`.

    Without a `call_end` a call ends with the answer or where the next begins."""

    around: tuple[str, str]
    call: str
    arguments: str
    call_end: str
    name: re.Pattern[str] = re.compile(r"\s*(.*?)\s*", re.DOTALL)
    """What stands in a name's place, the name itself as a group."""
    line_end: str = ""
    """What models write between calls."""


class SectionedCalls(SteppedParser):
    """Implements `router.parsers.answer_parts.PartsParser`. Marks are tokens of their own, which no text holds."""

    def __init__(self, marks: SectionMarks) -> None:
        super().__init__()
        self._marks = marks
        self._content = ContentAround()
        self._in_name = self._in_arguments = False

    def finish(self) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        if self._in_arguments:
            parts.append(ArgumentsPart(self._held))
        else:
            self._content.take((self._marks.call if self._in_name else "") + self._held, parts)
        self._held = ""
        self._content.finish(parts)
        return parts

    def _step(self, parts: list[AnswerPart]) -> bool:
        marks = self._marks
        if self._in_arguments:
            arguments, mark, self._held = cut_at(self._held, (marks.call_end or marks.call,))
            parts.append(ArgumentsPart(arguments))
            self._in_arguments, self._in_name = not mark, mark == marks.call
            return bool(mark)
        if self._in_name:
            name, mark, behind = cut_at(self._held, (marks.arguments,))
            if mark:
                self._content.called()
                found = marks.name.fullmatch(name)
                parts.append(CallPart(found[1] if found is not None else name.strip(SPACE)))
                self._held, self._in_name, self._in_arguments = behind, False, True
            return bool(mark)
        before, mark, self._held = cut_at(self._held, tuple(mark for mark in (*marks.around, marks.call) if mark))
        self._content.take(before, parts)
        self._in_name = mark == marks.call
        return bool(mark)


DEEPSEEK_V31 = SectionMarks(
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
)  # fmt: skip
DEEPSEEK_V3 = SectionMarks(
    DEEPSEEK_V31.around,
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>", line_end="\n",
)  # fmt: skip
KIMI_K2 = SectionMarks(
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    re.compile(r"\s*(?:functions\.)?(.*?)(?::\d+)?\s*", re.DOTALL),
)  # fmt: skip
MISTRAL = SectionMarks(
    ("", ""), "[TOOL_CALLS]", "[ARGS]", "", re.compile(r"\s*(.*?)\s*(?:\[CALL_ID\].*)?", re.DOTALL)
)  # fmt: skip


Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The grammar of a format's calls, in Lark's notation as llguidance reads it."""

    trigger: str
    """The text with which calls begin; empty where an answer that is a call is one from its first character on."""
    rules: str
    """The rule `calls`, of what follows the trigger, and those that it needs."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls."""

    name: str
    signs: tuple[str, ...]
    """Texts that a chat template has, all of them, where its model writes so."""
    marks: tuple[str, ...]
    """The texts that mark calls: each may be a token of its own."""
    parser: Callable[[ParameterTypes], PartsParser]
    grammar: Callable[[Sequence[tuple[str, Schema]], bool], CallGrammar]
    """Of calls of tools, each with the schema of its arguments; and whether there may be several calls."""
    foreign: tuple[str, ...] = ()
    """Texts that no chat template has whose model writes so."""


def _json(schema: Schema) -> str:
    """JSON that follows a schema, in one line."""
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_FORM})}"


def _object_rules(tools: Sequence[tuple[str, Schema]], arguments: str) -> str:
    """The rule `call`: an object with a name and arguments."""
    objects = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, arguments: schema},
            "required": ["name", arguments],
            "additionalProperties": False,
            **_lifted(schema),
        }
        for name, schema in tools
    ]
    rules = [f"call_{number}: {_json(schema)}" for number, schema in enumerate(objects)]
    return "\n".join((f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}", *rules))


def _lifted(schema: Schema) -> Schema:
    """Definitions of a schema, which references look for at the root."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _hermes_grammar(tools: Sequence[tuple[str, Schema]], several: bool) -> CallGrammar:
    more = ' ("\\n<tool_call>" one)*' if several else ""
    rules = f'calls: one{more}\none: "\\n" call "\\n</tool_call>"\n{_object_rules(tools, "arguments")}'
    return CallGrammar("<tool_call>", rules)


def _llama3_grammar(tools: Sequence[tuple[str, Schema]], several: bool) -> CallGrammar:
    more = ' ("; " call)*' if several else ""
    return CallGrammar("", f"calls: call{more}\n{_object_rules(tools, 'parameters')}")


def _sections_grammar(marks: SectionMarks, tools: Sequence[tuple[str, Schema]], several: bool) -> CallGrammar:
    calls = [
        f"call_{number}: {quoted(marks.call + name + marks.arguments)} {_json(schema)} {quoted(marks.call_end)}"
        for number, (name, schema) in enumerate(tools)
    ]
    between = f"{quoted(marks.line_end)} " if marks.line_end else ""
    more = f" ({between}call)*" if several else ""
    either = f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}"
    return CallGrammar(marks.around[0], "\n".join((f"calls: call{more} {quoted(marks.around[1])}", either, *calls)))


def _element_rules(tools: Sequence[tuple[str, Schema]], marks: ElementMarks, opening: str, closing: str) -> str:
    """The rule `call`: from `opening`, the name and its parameters in the order of the schema to `closing`.

    Raises `RequestError` for a keyword that this can't enforce.
    """
    end = f"{marks.around_value}{marks.value_end}{marks.line_end}"
    rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
    rules.append(f"text[suffix={quoted(end)}]: /(?s:.*)/")
    kinds = [marks.is_string, marks.is_string.replace("true", "false")] if marks.is_string else [""]
    begins = " | ".join(quoted(f"{marks.key_end}{_before_value(marks, kind)}") for kind in kinds)
    rules += [f"any: {quoted(marks.parameter)} KEY ({begins}) text", r'KEY: /[^<>"\n]{1,64}/']
    for number, (name, schema) in enumerate(tools):
        parameters = []
        _refuse_others(schema, _OF_ARGUMENTS, name)
        for place, (key, part) in enumerate((schema.get("properties") or {}).items()):
            kind = kinds[0] if _is_text(part) else kinds[-1]
            begin = quoted(f"{marks.parameter}{key}{marks.key_end}{_before_value(marks, kind)}")
            value = _value_rule(part, end, _lifted(schema), f"{name}.{key}")
            rules.append(f"value_{number}_{place}: {begin} {value}")
            optional = "" if key in (schema.get("required") or ()) else "?"
            parameters.append(f"value_{number}_{place}{optional}")
        if not parameters and schema.get("additionalProperties") is not False:
            parameters = ["any*"]
        begin = quoted(f"{opening}{name}{marks.name_end}{marks.line_end}")
        rules.append(f"call_{number}: {begin} {' '.join(parameters)} {quoted(closing)}")
    return "\n".join(rules)


_SAYS_NOTHING = frozenset({"title", "description", "default", "examples", "$schema", "$comment", "deprecated"})
_OF_ARGUMENTS = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions"})
_OF_TEXT = frozenset({"type", "enum", "const"})


def _refuse_others(schema: Schema, known: frozenset[str], where: str) -> None:
    others = schema.keys() - known - _SAYS_NOTHING
    if others:
        raise RequestError(
            f"tools: {where}: {', '.join(sorted(others))} can't be enforced as this model writes calls",
            param="tools",
        )


def _before_value(marks: ElementMarks, kind: str) -> str:
    """What stands between a key's end and a value."""
    return f"{f' {kind}' if kind else marks.before_value}{marks.value}{marks.around_value}"


def _is_text(schema: Schema) -> bool:
    return schema.get("type") == "string"


def _value_rule(schema: Schema, end: str, lifted: Schema, where: str) -> str:
    """What stands in the place of a value, with its end."""
    if not _is_text(schema):
        return f"{_json({**schema, **lifted})} {quoted(end)}"
    _refuse_others(schema, _OF_TEXT, where)
    if "enum" in schema or "const" in schema:
        words = schema.get("enum", [schema.get("const")])
        return f"({' | '.join(quoted(str(word)) for word in words)}) {quoted(end)}"
    return "text"


def _functions_grammar(marks: ElementMarks, tools: Sequence[tuple[str, Schema]], several: bool) -> CallGrammar:
    begin, end = marks.around
    more = f" ({quoted(marks.line_end + begin)} one)*" if several else ""
    one = f"one: {quoted(marks.line_end)} call {quoted(marks.line_end + end)}"
    return CallGrammar(begin, f"calls: one{more}\n{one}\n{_element_rules(tools, marks, marks.call, marks.call_end)}")


def _glm_grammar(marks: ElementMarks, tools: Sequence[tuple[str, Schema]], several: bool) -> CallGrammar:
    more = f" ({quoted(marks.line_end + marks.call)} call)*" if several else ""
    return CallGrammar(marks.call, f"calls: call{more}\n{_element_rules(tools, marks, '', marks.call_end)}")


def _invokes_grammar(marks: ElementMarks, tools: Sequence[tuple[str, Schema]], several: bool) -> CallGrammar:
    begin, end = marks.around
    rules = _element_rules(tools, marks, marks.call, marks.call_end + "\n")
    return CallGrammar(begin, f'calls: "\\n" call{"+" if several else ""} {quoted(end)}\n{rules}')


def _kimi_grammar(tools: Sequence[tuple[str, Schema]], several: bool) -> CallGrammar:
    marks = KIMI_K2
    calls = [
        f"call_{number}: {quoted(f'{marks.call}functions.{name}:')} /[0-9]{{1,3}}/ {quoted(marks.arguments)} "
        f"{_json(schema)} {quoted(marks.call_end)}"
        for number, (name, schema) in enumerate(tools)
    ]
    either = " | ".join(f"call_{number}" for number in range(len(tools)))
    rules = (f"calls: ({either}){'+' if several else ''} {quoted(marks.around[1])}", *calls)
    return CallGrammar(marks.around[0], "\n".join(rules))


def _mistral_grammar(tools: Sequence[tuple[str, Schema]], several: bool) -> CallGrammar:
    calls = [
        f"call_{number}: {quoted(name + MISTRAL.arguments)} {_json(schema)}"
        for number, (name, schema) in enumerate(tools)
    ]
    more = f" ({quoted(MISTRAL.call)} call)*" if several else ""
    either = f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}"
    return CallGrammar(MISTRAL.call, "\n".join((f"calls: call{more}", either, *calls)))


def _array_grammar(begin: str, end: str, tools: Sequence[tuple[str, Schema]], several: bool) -> CallGrammar:
    more = ' (", " call)*' if several else ""
    close = quoted("]" + end)
    return CallGrammar(begin, f'calls: " "? "[" call{more} {close}\n{_object_rules(tools, "arguments")}')


def _gemma_grammar(tools: Sequence[tuple[str, Schema]], several: bool) -> CallGrammar:
    return CallGrammar(gemma_calls.CALL, GemmaRules(_json).calls(tools, several))


def _harmony_grammar(tools: Sequence[tuple[str, Schema]], several: bool) -> CallGrammar:
    # A call ends the model's turn, so there is one.
    return CallGrammar("", call_rules([(name, _json(schema)) for name, schema in tools]))


HARMONY = "harmony"
"""The name of the format whose messages hold reasoning and content as well."""
GEMMA_4 = "gemma4"
_ELEMENTS = ("<tool_call>", "</tool_call>")
_GLM_ELEMENTS = (*_ELEMENTS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_TOOLCALL = ("<TOOLCALL>", "</TOOLCALL>")
_TOOL_CALLS = ("<tool_calls>", "</tool_calls>")
_GRANITE = "<|tool_call|>"
_PYTHON = ("<|python_tag|>",)


def _marks_of(marks: SectionMarks) -> tuple[str, ...]:
    return tuple(mark for mark in (*marks.around, marks.call, marks.arguments, marks.call_end) if mark)


FORMATS = {
    tool_format.name: tool_format
    for tool_format in (
        ToolFormat(HARMONY, ("<|channel|>analysis",), HARMONY_MARKS, HarmonyMessages, _harmony_grammar),
        ToolFormat(
            "deepseek_v4",
            ("｜DSML｜", "tool_calls>"),
            ("｜DSML｜",),
            lambda t: ElementCalls(DEEPSEEK_V4, t),
            partial(_invokes_grammar, DEEPSEEK_V4),
        ),
        ToolFormat(
            "deepseek_v32",
            ("｜DSML｜",),
            ("｜DSML｜",),
            lambda t: ElementCalls(DEEPSEEK_V32, t),
            partial(_invokes_grammar, DEEPSEEK_V32),
        ),
        ToolFormat(
            "minimax_m2",
            (MINIMAX_M2.around[0],),
            MINIMAX_M2.around,
            lambda t: ElementCalls(MINIMAX_M2, t),
            partial(_invokes_grammar, MINIMAX_M2),
        ),
        ToolFormat(
            "kimi_k2", (KIMI_K2.around[0],), _marks_of(KIMI_K2), lambda _: SectionedCalls(KIMI_K2), _kimi_grammar
        ),
        ToolFormat(
            "deepseek_v3",
            ("<｜tool▁sep｜>", "```json"),
            _marks_of(DEEPSEEK_V31),
            lambda _: SectionedCalls(DEEPSEEK_V3),
            partial(_sections_grammar, DEEPSEEK_V3),
        ),
        ToolFormat(
            "deepseek_v31",
            ("<｜tool▁sep｜>",),
            _marks_of(DEEPSEEK_V31),
            lambda _: SectionedCalls(DEEPSEEK_V31),
            partial(_sections_grammar, DEEPSEEK_V31),
        ),
        ToolFormat(
            "seed_oss",
            (SEED_OSS.around[0],),
            SEED_OSS.around,
            lambda t: ElementCalls(SEED_OSS, t),
            partial(_functions_grammar, SEED_OSS),
        ),
        ToolFormat(
            "qwen3_coder",
            ("<function=", "<parameter="),
            _ELEMENTS,
            lambda t: ElementCalls(QWEN3_CODER, t),
            partial(_functions_grammar, QWEN3_CODER),
        ),
        ToolFormat(
            "glm47",
            ("</arg_key><arg_value>",),
            _GLM_ELEMENTS,
            lambda t: ElementCalls(GLM_47, t),
            partial(_glm_grammar, GLM_47),
        ),
        ToolFormat(
            "glm45", ("<arg_key>",), _GLM_ELEMENTS, lambda t: ElementCalls(GLM_45, t), partial(_glm_grammar, GLM_45)
        ),
        ToolFormat(
            "mistral", (MISTRAL.arguments,), _marks_of(MISTRAL), lambda _: SectionedCalls(MISTRAL), _mistral_grammar
        ),
        ToolFormat(
            "mistral_json",
            (MISTRAL.call,),
            (MISTRAL.call,),
            lambda _: ArrayJsonCalls(MISTRAL.call),
            partial(_array_grammar, MISTRAL.call, ""),
        ),
        ToolFormat(
            "nemotron_json",
            (_TOOLCALL[0],),
            _TOOLCALL,
            lambda _: ArrayJsonCalls(*_TOOLCALL),
            partial(_array_grammar, *_TOOLCALL),
        ),
        ToolFormat(
            "apriel",
            (_TOOL_CALLS[0] + "[",),
            _TOOL_CALLS,
            lambda _: ArrayJsonCalls(*_TOOL_CALLS),
            partial(_array_grammar, *_TOOL_CALLS),
        ),
        ToolFormat(
            "granite",
            (_GRANITE,),
            (_GRANITE,),
            lambda _: ArrayJsonCalls(_GRANITE),
            partial(_array_grammar, _GRANITE, ""),
        ),
        ToolFormat(
            GEMMA_4,
            (gemma_calls.CALL + gemma_calls.NAMED,),
            (gemma_calls.CALL, gemma_calls.CALL_END, gemma_calls.QUOTE),
            lambda _: GemmaCalls(),
            _gemma_grammar,
        ),
        ToolFormat(
            # Llama 3.1's templates name <|python_tag|> as well, and so do others whose calls are no such objects.
            "llama3_json",
            ("ipython", '"parameters": '),
            _PYTHON,
            lambda _: WholeJsonCalls(_PYTHON),
            _llama3_grammar,
        ),
        ToolFormat(
            "hermes",
            (_ELEMENTS[0],),
            _ELEMENTS,
            lambda _: TaggedJsonCalls(*_ELEMENTS),
            _hermes_grammar,
            foreign=("<invoke name=",),
        ),
    )
}
"""The formats by name; of those whose sign a template has, the first counts."""


def format_of(template: str) -> str:
    """Return the name of the format that a chat template speaks of, empty where it is none of them."""
    return next((f.name for f in FORMATS.values() if _speaks(template, f)), "")


def _speaks(template: str, tool_format: ToolFormat) -> bool:
    return all(sign in template for sign in tool_format.signs) and not any(
        text in template for text in tool_format.foreign
    )
