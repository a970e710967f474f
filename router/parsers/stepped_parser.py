"""A parser that holds text until it knows what it is, and takes one thing of it at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod

from twinpool.router.parsers.answer_parts import AnswerPart


class SteppedParser(ABC):
    """The base of parsers that are `router.parsers.answer_parts.PartsParser`s by steps."""

    def __init__(self) -> None:
        self._held = ""
        """Text of which it isn't known yet what it is."""

    def feed(self, text: str) -> list[AnswerPart]:
        """Take the next piece; returns what is certain by now."""
        self._held += text
        parts: list[AnswerPart] = []
        while self._step(parts):
            pass
        return parts

    @abstractmethod
    def _step(self, parts: list[AnswerPart]) -> bool:
        """Take the next thing from the held text; False where more is needed."""
