"""The generic tool prompt: tools, calls and results as text, for chat templates that show none of them.

The tools are described in the system message, as Hermes' models are told of them; an earlier call is text of the
assistant's between ``<tool_call>`` and ``</tool_call>``, and the results that follow it are one turn of the user's,
each between ``<tool_response>`` and ``</tool_response>``. So the messages have no role but those that every template
knows, and users and assistants take turns, which some templates insist on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from twinpool.router.openai.tools import ToolUse

Message = dict[str, Any]
_RESULTS = ("tool", "function")
"""Roles of results; the latter is of an older API."""
_INTRODUCTION = """\
You can call functions to help with what the user asks. Each line between <tools> and </tools> describes one of them:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as a JSON object between <tool_call> and </tool_call>:
<tool_call>
{{"name": "the function's name", "arguments": {{"the argument's name": "its value"}}}}
</tool_call>
{several} The results come between <tool_response> and </tool_response>. If no function helps, answer without a call."""
_SEVERAL = "To call several, write one such block after the other."
_ONE = "Call one function at a time."


def with_tool_prompt(messages: Sequence[Message], use: ToolUse | None, *, takes_system: bool) -> list[Message]:
    """Return a chat's messages for a template that shows no tools; `use`: the tools that the model is shown now.
    Without `takes_system` they are described at the beginning of the first thing that the user says."""
    turns = _as_text(messages)
    return turns if use is None else _introduced(turns, _introduction(use), takes_system)


def _introduction(use: ToolUse) -> str:
    tools = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in use.shown)
    return _INTRODUCTION.format(tools=tools, several=_SEVERAL if use.parallel else _ONE)


def _introduced(turns: Sequence[Message], introduction: str, takes_system: bool) -> list[Message]:
    role = "system" if takes_system else "user"
    first = turns[0] if takes_system else next((turn for turn in turns if turn["role"] == "user"), None)
    if first is None or first["role"] != role:
        return [{"role": role, "content": introduction}, *turns]
    # What the system says comes first, as it does without tools; what a user asks is what the model answers, so last.
    said = [first["content"], introduction] if takes_system else [introduction, first["content"]]
    told = {**first, "content": "\n\n".join(part for part in said if part)}
    return [told if turn is first else turn for turn in turns]


def _as_text(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with calls and results as text."""
    turns: list[Message] = []
    results: list[Message] = []
    order: dict[str, int] = {}
    for message in messages:
        if message["role"] in _RESULTS:
            results.append(message)
            continue
        if results:
            answered = _results_turn(results, order)
            results = []
            if message["role"] == "user":
                turns.append({**message, "content": f"{answered}\n{message['content']}"})
                continue
            turns.append({"role": "user", "content": answered})
        calls = message.get("tool_calls") or ()
        order = {str(call.get("id")): number for number, call in enumerate(calls)}
        turns.append(_with_calls(message, calls) if calls else message)
    return [*turns, {"role": "user", "content": _results_turn(results, order)}] if results else turns


def _with_calls(message: Message, calls: Sequence[Message]) -> Message:
    written = [json.dumps(_called(call["function"]), ensure_ascii=False) for call in calls]
    blocks = (f"<tool_call>\n{call}\n</tool_call>" for call in written)
    content = "\n".join(part for part in (message["content"], *blocks) if part)
    return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": content}


def _called(function: Message) -> Message:
    return {"name": function["name"], "arguments": function["arguments"]}


def _results_turn(results: Sequence[Message], order: dict[str, int]) -> str:
    """Return the results as text, in the order of the calls that they answer, as nothing else says whose they are."""
    last = len(order)
    ordered = sorted(results, key=lambda result: order.get(str(result.get("tool_call_id")), last))
    return "\n".join(f"<tool_response>\n{result['content']}\n</tool_response>" for result in ordered)
