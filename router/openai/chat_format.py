"""How a model writes answers to chats, by its template: what parses them, and the grammar that makes them so.

A chat's messages are given to the template as it takes them (`messages_for`), where that isn't how OpenAI's API has
them.

**The generic tool prompt** (`with_tool_prompt`) shows tools, calls and results as text, for chat templates that show
none of them. The tools are described in the system message, as Hermes' models are told of them; an earlier call is text
of the assistant's between ``<tool_call>`` and ``</tool_call>``, and the results that follow it are one turn of the
user's, each between ``<tool_response>`` and ``</tool_response>``. So the messages have no role but those that every
template knows, and users and assistants take turns, which some templates insist on.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from twinpool.contracts.errors import RequestError
from twinpool.router.openai.client_grammar import why_not_compiled
from twinpool.router.openai.json_schemas import engine_fault, followed, grammar_of
from twinpool.router.openai.structured_output import bounded
from twinpool.router.openai.tools import ANY_OBJECT, ChatTool, ToolUse
from twinpool.router.parsers.answer_parts import PartsParser, quoted
from twinpool.router.parsers.harmony_messages import CALL, RETURN, HarmonyMessages, answer_rules
from twinpool.router.parsers.reasoning_parser import REASONING, PlainContent, ReasoningParser, opened, reasoning_of
from twinpool.router.parsers.tool_formats import FORMATS, HARMONY, CallGrammar, format_of
from twinpool.router.text.chat_template import PicturePart, TemplateTraits, TextParts

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
                turns.append({**message, "content": _together([answered, "\n", message["content"]])})
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
    last, texts = len(order), list[str]()
    for result in sorted(results, key=lambda result: order.get(str(result.get("tool_call_id")), last)):
        texts += ["\n<tool_response>\n" if texts else "<tool_response>\n", result["content"], "\n</tool_response>"]
    return _together(texts)


def _together(texts: Sequence[str]) -> str:
    """The texts as one, with the pictures that they have among them."""
    parts = [part for text in texts for part in (text.parts if isinstance(text, TextParts) else (text,))]
    return TextParts(parts) if any(isinstance(part, PicturePart) for part in parts) else "".join(texts)


def messages_for(tool_format: str, messages: Sequence[Message], *, developer: bool = True) -> list[Message]:
    """Return the messages for the template of a model that writes calls in `tool_format`. Reasoning has both of the
    names that templates read; where they don't know a `developer`, it is the system."""
    found = [_with_reasoning(message) for message in messages]
    if not developer:
        found = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in found]
    change = _CHANGES.get(tool_format)
    return found if change is None else change(found)


def _with_reasoning(message: Message) -> Message:
    told = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if told is None else {"thinking": told, **message, "reasoning_content": told}


_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names under which clients give reasoning back."""


def _harmony(messages: Sequence[Message]) -> list[Message]:
    """gpt-oss's template takes one call a message, which its result follows, and no content beside reasoning there."""
    found: list[Message] = []
    results: dict[object, deque[int]] = {}
    """By call id, the places of its results: clients may number the calls of each turn anew."""
    for at, message in enumerate(messages):
        if message.get("role") == "tool":
            results.setdefault(message.get("tool_call_id"), deque()).append(at)
    placed: set[int] = set()
    for at, message in enumerate(messages):
        if at in placed:
            continue
        calls = message.get("tool_calls") or ()
        if not calls:
            found.append(message)
            continue
        said = "\n\n".join(filter(None, (message.get("reasoning_content"), message.get("content"))))
        bare = {name: value for name, value in message.items() if name not in _REASONING}
        for number, call in enumerate(calls):
            one = {**bare, "content": "", "tool_calls": [call]}
            found.append({**one, "thinking": said} if said and number == 0 else one)
            places = results.get(call.get("id"), deque()) if len(calls) > 1 else deque()
            while places and places[0] < at:
                places.popleft()
            if places:
                placed.add(places[0])
                found.append(messages[places.popleft()])
    return found


def _renamed_calls(messages: Sequence[Message], name: Callable[[str, str, int], str]) -> list[Message]:
    """Give each call another id, by its id, its tool's name and its number, and its result the same."""
    ids: dict[str, str] = {}
    numbers = itertools.count()
    found: list[Message] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            changed = []
            for call in calls:
                given = str(call.get("id", ""))
                ids[given] = name(given, call["function"]["name"], next(numbers))
                changed.append({**call, "id": ids[given]})
            message = {**message, "tool_calls": changed}  # noqa: PLW2901
        elif message.get("tool_call_id") in ids:
            message = {**message, "tool_call_id": ids[message["tool_call_id"]]}  # noqa: PLW2901
        found.append(message)
    return found


def _mistral(messages: Sequence[Message]) -> list[Message]:
    """Mistral's templates take ids of nine letters and digits alone."""
    return _renamed_calls(messages, lambda given, _name, _number: hashlib.sha256(given.encode()).hexdigest()[:9])


def _kimi(messages: Sequence[Message]) -> list[Message]:
    """Kimi's templates write a call's id in the place of its name."""
    return _renamed_calls(messages, lambda _given, name, number: f"functions.{name}:{number}")


_CHANGES: dict[str, Callable[[Sequence[Message]], list[Message]]] = {
    "harmony": _harmony,
    "mistral": _mistral,
    "mistral_json": _mistral,
    "kimi_k2": _kimi,
}


AUTO, NONE = "auto", "none"
THINK = "think"
NO_TOOLS = (
    "this model's chat template shows no tools: router.tool_prompt=auto has a system message describe them, and "
    "router.tool_parser says how the model writes calls"
)
UNKNOWN_CALLS = (
    "this model's chat template shows tools, and calls in no format known here: router.tool_parser says how the model "
    "writes them"
)
TOOLS_OFF = "this server takes no tools: router.tool_parser is none"
GENERIC = "hermes"
"""The format of the generic tool prompt."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What is to be found in one answer."""

    tool_format: str = ""
    """Of `router.parsers.tool_formats`; empty where no tool may be called, but for ``harmony``, as which all is."""
    parameter_types: dict[str, dict[str, str]] | None = None
    """By tool and parameter, its JSON type."""
    reasoning: bool = False
    begun: bool = False
    """Whether the prompt ends within reasoning."""
    reasoning_marks: str = THINK
    """Of `router.parsers.reasoning_parser`."""

    @property
    def marks(self) -> frozenset[str]:
        """The texts that mark parts, which may be special tokens."""
        marks = FORMATS[self.tool_format].marks if self.tool_format else ()
        return frozenset((*marks, *(REASONING[self.reasoning_marks].tokens if self.reasoning else ())))

    @property
    def ending_marks(self) -> tuple[str, ...]:
        """The marks that end the model's turn."""
        return (CALL, RETURN) if self.tool_format == HARMONY else ()

    def parser(self) -> PartsParser:
        """Return a new parser of one answer."""
        if self.tool_format == HARMONY:
            return HarmonyMessages(self.parameter_types or {}, reasoning=self.reasoning)
        if self.tool_format:
            rest = FORMATS[self.tool_format].parser(self.parameter_types or {})
        else:
            rest = PlainContent()
        return ReasoningParser(rest, REASONING[self.reasoning_marks], begun=self.begun) if self.reasoning else rest


class ChatFormat:
    """The formats of one model. `tool_parser` and `reasoning_parser`: as `router.tool_parser` and so on say."""

    def __init__(
        self,
        template: str,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        *,
        tool_prompt: str = AUTO,
        traits: TemplateTraits = TemplateTraits(),  # noqa: B008 (frozen)
    ) -> None:
        """`template`: the chat template's source, empty where there is none. `tool_prompt`: as `router.tool_prompt`
        says. `traits`: what the template shows."""
        self._tools = format_of(template) if tool_parser == AUTO else tool_parser.replace(NONE, "")
        self._off = tool_parser == NONE
        self._shown = not template or traits.shows_tools
        replaced = tool_prompt == AUTO and tool_parser in (AUTO, GENERIC) and self._tools != HARMONY
        self._prompted = replaced and not self._shown
        if self._prompted:
            self._tools = GENERIC
        self._takes_system = traits.takes_system
        found = reasoning_of(template) if reasoning_parser == AUTO else reasoning_parser.replace(NONE, "")
        self._reasons = bool(found) or (self._tools == HARMONY and reasoning_parser == AUTO)
        self._marks = found or THINK
        self._developer = "developer" in template

    def answer_format(self, use: ToolUse | None, prompt: str) -> AnswerFormat | None:
        """Return what is to be found in the answer to a rendered `prompt`, None where that is nothing.

        Raises `RequestError` for tools that the model's template doesn't know.
        """
        if use is not None and not self._tools:
            why = TOOLS_OFF if self._off else UNKNOWN_CALLS if self._shown else NO_TOOLS
            raise RequestError(why, param="tools")
        if use is None and not self._reasons and self._tools != HARMONY:
            return None
        types = {tool.name: _types(tool) for tool in use.tools} if use is not None else None
        tool_format = self._tools if use is not None or self._tools == HARMONY else ""
        begun = self._reasons and opened(prompt, REASONING[self._marks])
        return AnswerFormat(tool_format, types, self._reasons, begun, self._marks)

    def grammar(self, use: ToolUse | None, found: AnswerFormat | None, asked: str) -> str:
        """Return the grammar of an answer in which `asked`, a grammar of structured output, is asked for; both may be
        empty. It begins where reasoning ends. Raises `RequestError` where a tool must be called and another output is
        asked for."""
        calls = self._calls(use, found)
        if use is not None and use.forced and asked:
            raise RequestError("tool_choice asks for a call, and another field for another output", param="tool_choice")
        if not asked and (use is None or not use.constrained):
            return ""
        if self._tools == HARMONY:
            calls_of = calls.rules if calls is not None else ""
            lark = answer_rules(calls_of, forced=use is not None and use.forced, asked=bool(asked))
            return _whole(lark, asked, use)
        rules = [calls.rules] if calls is not None else []
        called = f"{quoted(calls.trigger)} calls" if calls is not None and calls.trigger else "calls"
        if use is not None and use.forced:
            answer = called
        elif asked:
            answer = f"@answer | {called}" if calls is not None else "@answer"
        elif calls is not None and calls.trigger:
            answer = "(free calls)* rest" if use is not None and use.parallel else "free calls | rest"
            rules += [f"free[suffix={quoted(calls.trigger)}]: /(?s:.*)/", "rest: /(?s:.*)/"]
        else:
            answer = f"{called} | /([^{{](?s:.*))?/"
        if found is None or not found.reasoning:
            if asked and calls is None:
                return asked
            start = f"start: {answer}"
        else:
            marks = REASONING[found.reasoning_marks]
            thought = "thought" if found.begun else f"({quoted(marks.begin)} thought)?"
            start = f"start: {thought} SPACE? answer\nanswer: {answer}"
            rules += [f"thought[suffix={quoted(marks.end)}]: /(?s:.*)/", r"SPACE: /[ \n]{1,8}/"]
        return _whole("\n".join((start, *rules)), asked, use)

    @property
    def tools(self) -> dict[str, str | None]:
        """How chats have tools, for `/v1/models`: the format of calls, and what shows the model its tools, the
        ``template`` or the ``generic`` prompt; None for what there isn't."""
        shown = "generic" if self._prompted else "template" if self._tools and self._shown else None
        return {"format": self._tools or None, "prompt": shown}

    def messages(self, messages: Sequence[dict[str, Any]], use: ToolUse | None = None) -> list[dict[str, Any]]:
        """Return a chat's messages as the model's template takes them, `use` being the tools that it is to show."""
        found = messages_for(self._tools, messages, developer=self._developer)
        return with_tool_prompt(found, use, takes_system=self._takes_system) if self._prompted else found

    def shown(self, use: ToolUse | None) -> tuple[dict[str, Any], ...]:
        """Return the tools that the template is given: all, unless the messages describe them."""
        return use.shown if use is not None and not self._prompted else ()

    def _calls(self, use: ToolUse | None, found: AnswerFormat | None) -> CallGrammar | None:
        if use is None or found is None:
            return None
        schemas = [(tool.name, _followed(tool) if use.forced or tool.strict else ANY_OBJECT) for tool in use.tools]
        return FORMATS[found.tool_format].grammar(schemas, use.parallel)


def _whole(lark: str, asked: str, use: ToolUse | None) -> str:
    """Return the grammar with rules `lark`, of which ``answer`` is the grammar that is asked for, if one is."""
    grammars: list[dict[str, Any]] = [{"lark_grammar": lark}]
    if asked:
        (wanted,) = json.loads(asked)["grammars"]
        grammars.append({**wanted, "name": "answer"})
    return bounded(json.dumps({"grammars": grammars}), "tools" if use is not None else "response_format")


def _followed(tool: ChatTool) -> dict[str, Any]:
    """The schema of a call's arguments as a grammar follows it. Raises `RequestError` where none can."""
    try:
        return followed(tool.parameters)
    except ValueError as error:
        raise RequestError(f"the parameters of {tool.name} can't be followed: {error}", param="tools") from None


def tools_fault(use: ToolUse | None) -> str:
    """Which tool's parameters alone the engine refuses, with the place and why; empty where it refuses none's."""
    if use is None:
        return ""
    for tool in use.tools:
        if (use.forced or tool.strict) and (told := why_not_compiled(grammar_of(_followed(tool)))):
            return f"the parameters of {tool.name} can't be followed: {engine_fault(tool.parameters, told)}"
    return ""


def _types(tool: ChatTool) -> dict[str, str]:
    properties: dict[str, Any] = tool.parameters.get("properties") or {}
    return {key: part["type"] for key, part in properties.items() if isinstance(part.get("type"), str)}
