"""The parser of reasoning: what a model writes between ``<think>`` and ``</think>`` before its answer.

Reasoning comes first or not at all: an answer that begins otherwise has none, and the tags are then part of its text.
Whitespace around both is dropped.
"""

from __future__ import annotations

from typing import NamedTuple

from twinpool.router.parsers.answer_parts import SPACE, AnswerPart, ContentPart, PartsParser, ReasoningPart, cut_at


class ReasoningMarks(NamedTuple):
    """How reasoning is written: between `begin` and `end`."""

    begin: str
    end: str
    tokens: tuple[str, ...]
    """What of them may be tokens of their own."""


REASONING = {
    "think": ReasoningMarks("<think>", "</think>", ("<think>", "</think>")),
    "gemma4": ReasoningMarks("<|channel>thought\n", "<channel|>", ("<|channel>", "<channel|>")),
    "mistral": ReasoningMarks("[THINK]", "[/THINK]", ("[THINK]", "[/THINK]")),
    "seed_oss": ReasoningMarks("<seed:think>", "</seed:think>", ("<seed:think>", "</seed:think>")),
}
"""By name, as `router.reasoning_parser` has it."""


def reasoning_of(template: str) -> str:
    """Return the name of the marks that a chat template speaks of, empty where it is none of them."""
    return next((name for name, marks in REASONING.items() if any(token in template for token in marks.tokens)), "")


def opened(prompt: str, marks: ReasoningMarks) -> bool:
    """Whether a prompt ends within reasoning, as some templates have it: then answers begin there."""
    return prompt.rfind(marks.begin) > prompt.rfind(marks.end)


class PlainContent:
    """Implements `router.parsers.answer_parts.PartsParser` where nothing is to be found."""

    def feed(self, text: str) -> list[AnswerPart]:
        return [ContentPart(text)] if text else []

    def finish(self) -> list[AnswerPart]:
        return []


class ReasoningParser:
    """Implements `router.parsers.answer_parts.PartsParser`; what follows the reasoning goes to `rest`."""

    def __init__(self, rest: PartsParser, marks: ReasoningMarks, *, begun: bool) -> None:
        """`begun`: whether the prompt ends within reasoning."""
        self._rest, self._marks = rest, marks
        self._held = ""
        self._reasoning, self._sought, self._behind = begun, not begun, False
        self._lead = True
        """Whether nothing but whitespace of the reasoning came."""

    def feed(self, text: str) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        self._held += text
        if self._sought:
            self._look_for_begin()
        if self._reasoning:
            self._reason(parts)
        if not self._sought and not self._reasoning:
            self._go_on(parts)
        return parts

    def finish(self) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        if self._reasoning and self._held.strip(SPACE):
            parts.append(ReasoningPart(self._held))
        elif not self._reasoning:
            parts += self._rest.feed(self._held)
        self._held = ""
        return parts + self._rest.finish()

    def _look_for_begin(self) -> None:
        text = self._held.lstrip(SPACE)
        begin = self._marks.begin
        if text.startswith(begin):
            self._held = text[len(begin) :]
            self._sought, self._reasoning = False, True
        elif not begin.startswith(text):
            self._sought = False

    def _reason(self, parts: list[AnswerPart]) -> None:
        if self._lead:
            self._held = self._held.lstrip(SPACE)
            self._lead = not self._held
        before, mark, behind = cut_at(self._held, (self._marks.end,))
        # Whitespace is held back as well: it may be the last before the end.
        told = before.rstrip(SPACE)
        if told:
            parts.append(ReasoningPart(told))
        if mark:
            self._held, self._reasoning, self._behind = behind, False, True
        else:
            self._held = self._held[len(told) :]

    def _go_on(self, parts: list[AnswerPart]) -> None:
        if self._behind:
            self._held = self._held.lstrip(SPACE)
            self._behind = not self._held
        parts += self._rest.feed(self._held)
        self._held = ""
