"""A parser of calls that are written as elements, a parameter each: Qwen3-Coder, Seed-OSS, GLM, MiniMax-M2, DeepSeek.

Arguments become the text of one JSON object: a parameter of type string as a string, which is passed on while it is
written, any other as the JSON that it is, or as a string where it is none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from twinpool.router.parsers.answer_parts import (
    SPACE,
    AnswerPart,
    ArgumentsPart,
    CallPart,
    ContentAround,
    SteppedParser,
    cut_at,
    first_mark,
    held_back,
)

ParameterTypes = Mapping[str, Mapping[str, str]]
"""By tool and parameter, the parameter's JSON type; a parameter without one type has no entry."""


@dataclass(frozen=True, slots=True)
class ElementMarks:
    """How calls are written: `call` name `name_end`, then for each parameter `parameter` key `key_end` attribute
    `value` text `value_end`, then `call_end`. All calls, or each, stand between the two of `around`."""

    around: tuple[str, str]
    call: str
    name_end: str
    call_end: str
    parameter: str
    key_end: str
    value: str
    value_end: str
    is_string: str = ""
    """The attribute of a value that is a string; empty: the parameter's type says."""
    before_value: str = ""
    """What models write between a key's end, with its attribute, and `value`."""
    around_value: str = ""
    """What models write around a value, which isn't part of it."""
    line_end: str = "\n"
    """What models write behind the name and behind each value."""


class _ElementState(StrEnum):
    OUTSIDE = "outside"
    NAME = "in a name"
    BETWEEN = "between parameters"
    KEY = "in a key"
    ATTRIBUTE = "between a key and its value"
    VALUE = "in a value"


class ElementCalls(SteppedParser):
    """Implements `router.parsers.answer_parts.PartsParser`."""

    def __init__(self, marks: ElementMarks, types: ParameterTypes) -> None:
        super().__init__()
        self._marks, self._types = marks, types
        self._content = ContentAround()
        self._raw = ""
        """The text of a call whose name isn't told."""
        self._state = _ElementState.OUTSIDE
        self._name = self._key = ""
        self._first = True
        self._text: list[str] | None = None
        """A value that isn't passed on while it is written."""
        self._lead = False
        """Whether nothing of the value came yet."""

    def finish(self) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        if self._state in (_ElementState.OUTSIDE, _ElementState.NAME):
            self._content.take(self._raw + self._held, parts)
        elif self._state is _ElementState.VALUE and self._text is None:
            self._pass_on(self._held, parts)
        self._held = self._raw = ""
        self._content.finish(parts)
        return parts

    def _step(self, parts: list[AnswerPart]) -> bool:
        marks = self._marks
        match self._state:
            case _ElementState.OUTSIDE:
                return self._outside(parts)
            case _ElementState.NAME:
                return self._read_name(parts)
            case _ElementState.BETWEEN:
                found = self._after((marks.parameter, marks.call_end))
                if found == marks.call_end:
                    parts.append(ArgumentsPart("{}" if self._first else "}"))
                    self._state = _ElementState.OUTSIDE
                elif found:
                    self._state = _ElementState.KEY
                return bool(found)
            case _ElementState.KEY:
                return self._read_key()
            case _ElementState.ATTRIBUTE:
                return self._read_attribute(parts)
            case _:
                return self._read_value(parts)

    def _outside(self, parts: list[AnswerPart]) -> bool:
        marks = self._marks
        begin, end = marks.around
        known = tuple(mark for mark in (begin, marks.call, end if self._content.called_once else "") if mark)
        before, mark, rest = cut_at(self._held, known)
        self._content.take(before, parts)
        self._held = mark + rest
        if not mark:
            return False
        if mark == end and self._content.after_call:
            self._held = self._held[len(mark) :]
            return True
        behind = self._held[len(mark) :].lstrip(SPACE) if mark == begin else self._held
        if mark != end and behind.startswith(marks.call):
            self._raw = self._held[: len(self._held) - len(behind) + len(marks.call)]
            self._held = behind[len(marks.call) :]
            self._state = _ElementState.NAME
            return True
        if mark == begin and marks.call.startswith(behind):
            return False
        self._content.take(mark, parts)
        self._held = self._held[len(mark) :]
        return True

    def _read_name(self, parts: list[AnswerPart]) -> bool:
        """Read the name up to its end, which may be the beginning of what comes next."""
        marks = self._marks
        ends = (marks.name_end,) if marks.name_end else (marks.parameter, marks.call_end)
        found = first_mark(self._held, ends)
        if found is None:
            return False
        at, mark = found
        name = self._held[:at].strip(SPACE)
        if not name or "<" in name:
            self._content.take(self._raw, parts)
            self._raw, self._state = "", _ElementState.OUTSIDE
            return True
        self._held = self._held[at + len(mark) if marks.name_end else at :]
        self._content.called()
        parts.append(CallPart(name))
        self._name, self._first, self._raw, self._state = name, True, "", _ElementState.BETWEEN
        return True

    def _after(self, marks: tuple[str, ...]) -> str:
        """Drop the held text up to the first of `marks` and with it; returns that mark, empty where none is there."""
        _, mark, self._held = cut_at(self._held, marks)
        return mark

    def _read_key(self) -> bool:
        key, mark, behind = cut_at(self._held, (self._marks.key_end,))
        if mark:
            self._key, self._held, self._state = key.strip(SPACE), behind, _ElementState.ATTRIBUTE
        return bool(mark)

    def _read_attribute(self, parts: list[AnswerPart]) -> bool:
        at = self._held.find(self._marks.value)
        if at < 0:
            return False
        self._begin_value(self._held[:at].strip(SPACE), parts)
        self._held = self._held[at + len(self._marks.value) :]
        self._state = _ElementState.VALUE
        return True

    def _begin_value(self, attribute: str, parts: list[AnswerPart]) -> None:
        known = self._types.get(self._name, {}).get(self._key, "")
        string = attribute == self._marks.is_string if self._marks.is_string else known == "string"
        self._text = None if string else []
        self._lead = True
        begin = f"{'{' if self._first else ', '}{json.dumps(self._key, ensure_ascii=False)}: "
        parts.append(ArgumentsPart(begin + ('"' if string else "")))
        self._first = False

    def _read_value(self, parts: list[AnswerPart]) -> bool:
        """Read a value; the line breaks right behind its beginning and before its end aren't part of it."""
        end = self._marks.value_end
        if self._lead and self._held:
            self._held, self._lead = self._held.removeprefix("\n"), False
        at = self._held.find(end)
        if at < 0:
            cut = len(self._held) - held_back(self._held, (end, "\n" + end))
            self._pass_on(self._held[:cut], parts)
            self._held = self._held[cut:]
            return False
        self._pass_on(self._held[:at].removesuffix("\n"), parts)
        self._held = self._held[at + len(end) :]
        parts.append(ArgumentsPart('"' if self._text is None else _as_json("".join(self._text))))
        self._state = _ElementState.BETWEEN
        return True

    def _pass_on(self, text: str, parts: list[AnswerPart]) -> None:
        if self._text is None:
            parts.append(ArgumentsPart(json.dumps(text, ensure_ascii=False)[1:-1]))
        else:
            self._text.append(text)


def _as_json(text: str) -> str:
    """Return a value as JSON: as it is where it is JSON, else as a string."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text.strip(SPACE)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


QWEN3_CODER = ElementMarks(
    ("<tool_call>", "</tool_call>"),
    "<function=",
    ">",
    "</function>",
    "<parameter=",
    ">",
    "",
    "</parameter>",
    around_value="\n",
)
SEED_OSS = replace(QWEN3_CODER, around=("<seed:tool_call>", "</seed:tool_call>"), around_value="")
GLM_45 = ElementMarks(
    ("", ""),
    "<tool_call>",
    "",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    before_value="\n",
)
GLM_47 = replace(GLM_45, before_value="", line_end="")
MINIMAX_M2 = ElementMarks(
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    '<invoke name="', '">', "</invoke>", '<parameter name="', '">', "", "</parameter>",
)  # fmt: skip
DEEPSEEK_V32 = ElementMarks(
    ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    '<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="', '"', ">", "</｜DSML｜parameter>", is_string='string="true"',
)  # fmt: skip
DEEPSEEK_V4 = replace(DEEPSEEK_V32, around=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"))
