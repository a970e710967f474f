"""A parser of the harmony format, in which gpt-oss answers: messages, each with a channel and maybe a recipient.

An answer goes on behind ``<|start|>assistant``. A message is a header, ``<|message|>``, a text, and a mark at its end.
The header has the channel behind ``<|channel|>``, and for a call of a tool ``to=functions.NAME`` before or behind it.
Channel `analysis` is reasoning, the others are content; a call's text is its arguments.

The grammar of answers in the harmony format, in Lark's notation with marks as text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum

from twinpool.router.parsers.answer_parts import (
    SPACE,
    AnswerPart,
    ArgumentsPart,
    CallPart,
    ContentPart,
    ReasoningPart,
    SteppedParser,
    cut_at,
    quoted,
)
from twinpool.router.parsers.element_calls import ParameterTypes

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN)
HARMONY_MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
"""The marks, which are special tokens in gpt-oss."""
FUNCTIONS = "functions."
"""What stands before the name of a tool of the client's."""
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_TO = "to="
_NO_TOOLS = ("assistant", "user", "all")
"""Recipients that aren't tools: results of tools are addressed so."""


class _MessageState(StrEnum):
    BEGIN = "at the beginning of the answer"
    OUTSIDE = "between messages"
    HEADER = "in a header"
    TEXT = "in a message's text"


class HarmonyMessages(SteppedParser):
    """Implements `router.parsers.answer_parts.PartsParser`. Text that stands in no message is content."""

    def __init__(self, types: ParameterTypes, *, reasoning: bool = True) -> None:
        """`types`: of the tools that may be called; without one, calls are content. `reasoning`: whether it is told
        apart from content."""
        super().__init__()
        self._tools, self._reasoning = bool(types), reasoning
        self._state = _MessageState.BEGIN
        self._kind: type[ContentPart | ReasoningPart | ArgumentsPart] = ContentPart
        self._told: set[type] = set()
        """The kinds of text of which there was some."""
        self._first = True
        """Whether the message has no text yet."""

    def finish(self) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        # A header that breaks off says nothing.
        if self._state is not _MessageState.HEADER:
            self._tell(self._held, parts)
        self._held = ""
        return parts

    def _step(self, parts: list[AnswerPart]) -> bool:
        match self._state:
            case _MessageState.BEGIN:
                return self._begin()
            case _MessageState.OUTSIDE:
                before, mark, self._held = cut_at(self._held, HARMONY_MARKS)
                self._tell(before, parts)
                if mark in (START, CHANNEL):
                    self._held, self._state = mark + self._held, _MessageState.HEADER
                return bool(mark)
            case _MessageState.HEADER:
                return self._read_header(parts)
            case _MessageState.TEXT:
                text, mark, behind = cut_at(self._held, (*ENDS, START))
                self._tell(text, parts)
                self._held = START + behind if mark == START else behind
                if mark:
                    self._state, self._kind, self._first = _MessageState.OUTSIDE, ContentPart, True
                return bool(mark)

    def _begin(self) -> bool:
        """Look whether the answer begins with a header."""
        text = self._held.lstrip(SPACE)
        signs = (START, CHANNEL, MESSAGE, _TO)
        if any(text.startswith(sign) for sign in signs):
            self._held, self._state = text, _MessageState.HEADER
            return True
        if any(sign.startswith(text) for sign in signs):
            return False
        self._state = _MessageState.OUTSIDE
        return True

    def _read_header(self, parts: list[AnswerPart]) -> bool:
        """Read the header up to its text. Where another mark comes first, there is no message."""
        header, mark, behind = cut_at(self._held.removeprefix(START), (MESSAGE, *ENDS, START))
        if not mark:
            return False
        self._held, self._state = behind, _MessageState.TEXT
        if mark != MESSAGE:
            self._held, self._state = START + behind if mark == START else behind, _MessageState.OUTSIDE
            return True
        self._first = True
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient is not None and recipient[1] not in _NO_TOOLS and self._tools:
            self._kind = ArgumentsPart
            parts.append(CallPart(recipient[1].removeprefix(FUNCTIONS)))
        elif channel is not None and channel[1] == "analysis" and self._reasoning:
            self._kind = ReasoningPart
        else:
            self._kind = ContentPart
        return True

    def _tell(self, text: str, parts: list[AnswerPart]) -> None:
        if not text:
            return
        # What two messages say isn't run together.
        if self._first and self._kind is not ArgumentsPart and self._kind in self._told:
            text = "\n\n" + text
        self._first = False
        self._told.add(self._kind)
        parts.append(self._kind(text))


_NEXT = f"{START}assistant"
_JSON = f'({quoted(f" {CONSTRAIN}json")} | " json")? {quoted(MESSAGE)}'
"""The end of a header that may say that JSON follows."""
_TEXT = "/(?s:.*)/"


def call_rules(tools: Sequence[tuple[str, str]]) -> str:
    """Return the rule `calls`, one call of tools, each with the rule of its arguments. A model's turn ends with it."""
    rules = [f"calls: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
    for number, (name, arguments) in enumerate(tools):
        recipient = f" to={FUNCTIONS}{name}"
        before, behind = quoted(f"{recipient}{CHANNEL}commentary"), quoted(f"{CHANNEL}commentary{recipient}")
        rules.append(f"call_{number}: ({before} | {behind}) {_JSON} {arguments}")
    return "\n".join(rules)


def answer_rules(calls: str, *, forced: bool, asked: bool) -> str:
    """Return the grammar of an answer: `calls` are the rules of `call_rules`, empty where there are no tools. `forced`:
    the answer is a call. `asked`: the answer that is none follows the grammar ``answer``."""
    said = quoted(f"{CHANNEL}commentary{MESSAGE}")
    head = quoted(f"{CHANNEL}final")
    final = f"{head} {_JSON} @answer" if asked else f"{head} {quoted(MESSAGE)} {_TEXT}"
    ends = [*(["calls"] if calls else []), *([] if forced else ["final"])]
    rules = [
        f"start: {'thought' if asked and not calls else '(thought | said)'}* ({' | '.join(ends)})",
        f"thought: {quoted(f'{CHANNEL}analysis{MESSAGE}')} text {quoted(_NEXT)}",
        f"said: {said} text {quoted(_NEXT)}",
        f"text[suffix={quoted(END)}]: {_TEXT}",
        f"final: {final}",
        calls,
    ]
    return "\n".join(rule for rule in rules if rule)
