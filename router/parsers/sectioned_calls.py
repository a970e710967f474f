"""A parser of calls in sections of marks, their arguments as JSON text: DeepSeek-V3 and V3.1, Kimi, Mistral."""

from __future__ import annotations

import re
from dataclasses import dataclass

from twinpool.router.parsers.answer_parts import (
    SPACE,
    AnswerPart,
    ArgumentsPart,
    CallPart,
    ContentAround,
    SteppedParser,
    cut_at,
)


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
