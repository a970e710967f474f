"""The grammar of answers in the harmony format, in Lark's notation with marks as text."""

from __future__ import annotations

from collections.abc import Sequence

from twinpool.router.parsers.harmony_messages import CHANNEL, CONSTRAIN, END, FUNCTIONS, MESSAGE, START
from twinpool.router.parsers.lark_literal import quoted

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
