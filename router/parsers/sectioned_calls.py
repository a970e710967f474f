"""A parser of calls in sections of marks, their arguments as JSON text: DeepSeek-V3.1."""

from __future__ import annotations

from dataclasses import dataclass

from router.parsers.answer_parts import AnswerPart, ArgumentsPart, CallPart, first_mark, held_back
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
            at = self._held.find(marks.call_end)
            if at < 0:
                cut = len(self._held) - held_back(self._held, (marks.call_end,))
                parts.append(ArgumentsPart(self._held[:cut]))
                self._held = self._held[cut:]
                return False
            parts.append(ArgumentsPart(self._held[:at]))
            self._held, self._in_arguments = self._held[at + len(marks.call_end) :], False
            return True
        if self._in_name:
            at = self._held.find(marks.arguments)
            if at < 0:
                return False
            self._content.called()
            parts.append(CallPart(self._held[:at].strip(SPACE)))
            self._held = self._held[at + len(marks.arguments) :]
            self._in_name, self._in_arguments = False, True
            return True
        known = (*marks.around, marks.call)
        found = first_mark(self._held, known)
        end = found[0] if found else len(self._held) - held_back(self._held, known)
        self._content.take(self._held[:end], parts)
        self._held = self._held[end:]
        if found is None:
            return False
        self._held = self._held[len(found[1]) :]
        self._in_name = found[1] == marks.call
        return True


DEEPSEEK_V31 = SectionMarks(
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
)  # fmt: skip
