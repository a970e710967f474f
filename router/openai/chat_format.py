"""How a model writes answers to chats, by its template: what parses them, and the grammar that makes them so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twinpool.contracts.errors import RequestError
from twinpool.router.openai.grammar_check import why_not_compiled
from twinpool.router.openai.json_schemas import engine_fault, followed, grammar_of
from twinpool.router.openai.structured_output import bounded
from twinpool.router.openai.template_messages import messages_for
from twinpool.router.openai.tool_prompt import with_tool_prompt
from twinpool.router.openai.tools import ANY_OBJECT, ChatTool, ToolUse
from twinpool.router.parsers.answer_parts import PartsParser
from twinpool.router.parsers.harmony_grammar import answer_rules
from twinpool.router.parsers.harmony_messages import CALL, RETURN, HarmonyMessages
from twinpool.router.parsers.lark_literal import quoted
from twinpool.router.parsers.reasoning_parser import REASONING, PlainContent, ReasoningParser, opened, reasoning_of
from twinpool.router.parsers.tool_formats import FORMATS, HARMONY, CallGrammar, format_of
from twinpool.router.text.chat_template import TemplateTraits

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
