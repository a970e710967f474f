"""The content of an answer around its calls: whitespace between content and a call is dropped."""

from __future__ import annotations

from twinpool.router.parsers.answer_parts import AnswerPart, ContentPart

SPACE = " \t\r\n"


class ContentAround:
    """The content of one answer. Whitespace is held back until it is known what follows it."""

    def __init__(self) -> None:
        self._space = ""
        self.called_once = False
        self.after_call = False
        """Whether nothing but whitespace came since the latest call."""

    def take(self, text: str, parts: list[AnswerPart]) -> None:
        """Take text outside calls; adds what is certain to `parts`."""
        if self.after_call:
            text = text.lstrip(SPACE)
        told = text.rstrip(SPACE)
        if told:
            parts.append(ContentPart(self._space + told))
            self._space, self.after_call = "", False
        self._space += text[len(told) :]

    def called(self) -> None:
        """Note that a call stands here."""
        self._space, self.called_once, self.after_call = "", True, True

    def finish(self, parts: list[AnswerPart]) -> None:
        """Take the end of the answer: whitespace at the end of one without calls is content."""
        if not self.called_once and self._space:
            parts.append(ContentPart(self._space))
        self._space = ""
