"""A parser of calls in sections of marks, their arguments as JSON text: DeepSeek-V3.1."""

from __future__ import annotations

from dataclasses import dataclass

from router.parsers.answer_parts import AnswerPart, ArgumentsPart, CallPart, cut_at
from router.parsers.content_around import SPACE, ContentAround


@dataclass(frozen=True, slots=True)
class SectionMarks:
    """How calls are written: `call` name `arguments` JSON `call_end`, all of them between the two of `around`."""

    around: tuple[str, str]
    call: str
    arguments: str
    call_end: str


class SectionedCalls:
    """Implements `router.parsers.answer_parts.PartsParser`. Marks are tokens of their own, which no text holds."""

    def __init__(self, marks: SectionMarks) -> None:
        self._marks = marks
        self._content = ContentAround()
        self._held = ""
        self._in_name = self._in_arguments = False

    def feed(self, text: str) -> list[AnswerPart]:
        self._held += text
        parts: list[AnswerPart] = []
        while self._step(parts):
            pass
        return parts

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
        """Take the next thing from the held text; False where more is needed."""
        marks = self._marks
        if self._in_arguments:
            arguments, mark, self._held = cut_at(self._held, (marks.call_end,))
            parts.append(ArgumentsPart(arguments))
            self._in_arguments = not mark
            return bool(mark)
        if self._in_name:
            name, mark, behind = cut_at(self._held, (marks.arguments,))
            if mark:
                self._content.called()
                parts.append(CallPart(name.strip(SPACE)))
                self._held, self._in_name, self._in_arguments = behind, False, True
            return bool(mark)
        before, mark, self._held = cut_at(self._held, (*marks.around, marks.call))
        self._content.take(before, parts)
        self._in_name = mark == marks.call
        return bool(mark)


DEEPSEEK_V31 = SectionMarks(
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
)  # fmt: skip
