"""Chat templates: the checkpoint's Jinja templates, rendered in a sandbox and with bounded output.

A template is data from the checkpoint, messages are data from a client. The sandbox is immutable: a template can't
reach Python's internals or change its arguments. Characters are counted while they are rendered.

A chat's last message can be left open, so that the answer goes on with it, as transformers renders it. A template
writes a message's content somewhere in the middle of what it makes of it. So the message gets a mark at its end, and
the prompt ends where the mark came to be.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from twinpool.contracts.checkpoint.tokenizer_files import TokenizerFiles, read_checkpoint_text
from twinpool.contracts.errors import CheckpointError, RequestError

_REFUSALS = (TemplateError, TypeError, ValueError, ArithmeticError, AttributeError, LookupError)
"""What a template raises that can't make anything of its messages."""


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a chat template makes of a chat, as rendering one shows; a text search would find a template's comments."""

    shows_tools: bool = True
    """Whether the prompt of a chat with tools names them."""
    takes_system: bool = True
    """Whether a system message at the beginning comes to be in the prompt."""


class TextParts(str):
    """A message's content that came as several parts: as one text it is their lines."""

    __slots__ = ("parts",)
    parts: tuple[str, ...]

    def __new__(cls, parts: Sequence[str]) -> TextParts:
        made = super().__new__(cls, "\n".join(part for part in parts if not isinstance(part, PicturePart)))
        made.parts = tuple(parts)
        return made


class PicturePart(str):
    """A picture among the parts of a content; as text it is nothing."""

    __slots__ = ("source", "where")
    source: str
    """Its URL."""
    where: str
    """Its place in the request's body."""

    def __new__(cls, source: str, where: str) -> PicturePart:
        made = super().__new__(cls)
        made.source, made.where = source, where
        return made


class CallArguments(dict[str, Any]):
    """The arguments of a call in an earlier answer. Templates take them as an object; printed whole they are the JSON
    that the model wrote."""

    __slots__ = ("_text",)

    def __init__(self, values: Mapping[str, Any], text: str = "") -> None:
        """`text`: the JSON as it was written, empty where it is not known."""
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text or json.dumps(self, ensure_ascii=False)


class ChatTemplate:
    """One compiled template. `specials` are the token strings that templates may name (``bos_token``, ...).

    `for_tools`: the template of chats with tools, where that is another. Raises `CheckpointError` for a template that
    can't be compiled.
    """

    def __init__(self, source: str, specials: Mapping[str, str], max_chars: int, for_tools: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        self.source = for_tools or source
        """The text that says how the model writes calls."""
        self._max_chars = max_chars
        self._specials = dict(specials)
        self._forms: tuple[bool, bool] | None = None
        try:
            self._template = environment.from_string(source)
            self._for_tools = environment.from_string(for_tools) if for_tools else self._template
        except TemplateError as error:
            raise CheckpointError(f"the checkpoint's chat template can't be read: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        extra: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return the prompt's text; `extra` are the client's `chat_template_kwargs`.

        Raises `RequestError` where the template refuses the messages or its output is above `max_chars`.
        """
        values = {
            **self._specials,
            "documents": None,
            **extra,
            "messages": [self._formed(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": list(tools) or None,
        }
        template = self._for_tools if tools else self._template
        try:
            return self._generated(template, values)
        except _REFUSALS as error:
            message = " ".join(str(error).split())
        if any(m.get("tool_calls") for m in messages):  # Some templates take the arguments of calls as JSON text.
            with suppress(*_REFUSALS):
                return self._generated(template, {**values, "messages": [_with_text(m) for m in values["messages"]]})
        raise RequestError(f"the chat template refused the messages: {message}", param="messages")

    def _formed(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message with its content as the template takes it: where it knows parts, those that the client sent
        are parts, and where it knows nothing else, a text is one."""
        content = message.get("content")
        if not isinstance(content, str):
            return message
        as_text, as_parts = self._content_forms()
        if isinstance(content, TextParts) and any(isinstance(part, PicturePart) for part in content.parts):
            return {**message, "content": list(map(_as_part, content.parts))}
        sent = isinstance(content, TextParts) and message.get("role") != "tool"  # Of which few templates take parts.
        if not as_parts or (as_text and not sent):
            return message
        parts = content.parts if isinstance(content, TextParts) else (content,) if content else ()
        return {**message, "content": list(map(_as_part, parts))}

    def _content_forms(self) -> tuple[bool, bool]:
        """Whether a user's text comes to be in the prompt when it is a text, and when it is parts; rendered once."""
        if self._forms is None:
            first, second = _PROBE_TEXTS
            parts = [{"type": "text", "text": first}, {"type": "text", "text": second}]
            self._forms = True, False  # As which the probes are rendered.
            as_text, as_parts = (
                self._probed([{"role": "user", "content": content}]) for content in (first + second, parts)
            )
            written = "'type'" in as_parts or '"type"' in as_parts  # As a list, and not as text.
            parted = first in as_parts and second in as_parts and not written
            self._forms = first + second in as_text or not parted, parted
        return self._forms

    def traits(self) -> TemplateTraits:
        """Return what the template does with tools and with a system message, by rendering some."""
        user: dict[str, Any] = {"role": "user", "content": "probe of a user"}
        system: dict[str, Any] = {"role": "system", "content": "probe of a system"}
        shows = any(_PROBE_TOOL in self._probed(chat, (_PROBE,)) for chat in ([user], [system, user]))
        return TemplateTraits(shows, system["content"] in self._probed([system, user]))

    def _probed(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        try:
            return self.render(messages, True, {}, tools)
        except RequestError:
            return ""

    def _generated(self, template: Template, values: Mapping[str, Any]) -> str:
        parts: list[str] = []
        size = 0
        for part in template.generate(values):
            parts.append(part)
            size += len(part)
            if size > self._max_chars:
                message = f"the chat template made more than {self._max_chars} characters of the messages"
                raise RequestError(message, param="messages")
        return "".join(parts)


def _as_part(part: str) -> dict[str, str]:
    return {"type": "image"} if isinstance(part, PicturePart) else {"type": "text", "text": part}


_PROBE_TEXTS = "probe of", "a user"
_PROBE_TOOL = "probe_of_a_tool"
_PROBE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _PROBE_TOOL,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string", "description": "A text."}}},
    },
}


def read_chat_template(model: Path, files: TokenizerFiles, max_chars: int) -> ChatTemplate | None:
    """Return the template of a checkpoint, its folder or GGUF file; None without one.

    It is `chat_template.jinja`, else `chat_template` of the tokenizer's config: a text, or of a list the entry named
    ``default``, else the first. With tools it is `additional_chat_templates/tool_use.jinja`, or the list's entry
    ``tool_use``, where there is one. Raises `CheckpointError` for a template that can't be compiled.
    """
    source: object = read_checkpoint_text(model, "chat_template.jinja")
    source = files.config.get("chat_template") if source is None else source
    for_tools: object = read_checkpoint_text(model, "additional_chat_templates/tool_use.jinja")
    if isinstance(source, list):
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = named.get("default") or next(iter(named.values()), None)
        for_tools = for_tools or named.get("tool_use")
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, files.named, max_chars, for_tools if isinstance(for_tools, str) else "")


class _GenerationTag(Extension):
    """The tag ``generation``, by which templates mark for training what a model writes. It changes no text."""

    tags = {"generation"}  # noqa: RUF012 (jinja reads it of the class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with the arguments of its calls as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        arguments = str(arguments if isinstance(arguments, CallArguments) else CallArguments(arguments))
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML; a prompt is no HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime(pattern)


_MARK = "\ue010the answer goes on here\ue011"
"""Private-use characters, so that it is nobody's text; a space behind it shows whether the template trims messages."""


def check_open(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise `RequestError` where an answer can't go on with the last message."""
    last = messages[-1]
    if last.get("tool_calls") or not last["content"].strip():
        raise RequestError("continue_final_message needs a last message with text and no calls", param="messages")


def marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with a mark at the end of the last one. Raises `RequestError` as `check_open` does."""
    check_open(messages)
    *earlier, last = messages
    return [*earlier, {**last, "content": f"{last['content']}{_MARK} "}]


def cut_at_mark(text: str) -> str:
    """Return a rendered chat up to its mark; without spaces before it where the template trims messages.

    Raises `RequestError` where the template doesn't show the last message's end.
    """
    before, found, after = text.rpartition(_MARK)
    if not found:
        raise RequestError(
            "the chat template doesn't show the last message, so nothing can go on with it", param="messages"
        )
    return before if after.startswith(" ") else before.rstrip()
