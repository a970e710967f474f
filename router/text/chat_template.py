"""Chat templates: the checkpoint's Jinja, sandboxed and bounded.

A template is data from the checkpoint, messages are data from a client. The sandbox is immutable: a template can't
reach Python's internals or change what it was given. Output is counted while it is rendered.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from contracts.errors import CheckpointError, RequestError


class ChatTemplate:
    """One compiled template. `specials` are the token strings templates may name (``bos_token``, ...)."""

    def __init__(self, source: str, specials: Mapping[str, str], max_chars: int) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        self._max_chars = max_chars
        self._specials = dict(specials)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise CheckpointError(f"the checkpoint's chat template can't be read: {error}") from None

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, extra: Mapping[str, Any]
    ) -> str:
        """The prompt's text. Raises `RequestError` where the template refuses the messages or grows too long."""
        values = {
            **self._specials,
            **extra,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
        }
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(values):
                parts.append(part)
                size += len(part)
                if size > self._max_chars:
                    raise RequestError(f"the chat template made more than {self._max_chars} characters of the messages")
        except RequestError:
            raise
        except (TemplateError, TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
            message = " ".join(str(error).split())
            raise RequestError(f"the chat template refused the messages: {message}", param="messages") from None
        return "".join(parts)


def read_chat_template(folder: Path, tokenizer_config: Mapping[str, Any], max_chars: int) -> ChatTemplate | None:
    """The folder's template: `chat_template.jinja`, else `chat_template` of the tokenizer's config (its text, or the
    entry named ``default`` of a list). None where there is none; raises `CheckpointError` for one that can't be read.
    """
    path = folder / "chat_template.jinja"
    source: object = path.read_text(encoding="utf-8") if path.is_file() else tokenizer_config.get("chat_template")
    if isinstance(source, list):
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = named.get("default") or next(iter(named.values()), None)
    if not isinstance(source, str):
        return None
    specials = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = tokenizer_config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        specials[name] = text if isinstance(text, str) else ""
    return ChatTemplate(source, specials, max_chars)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    # Jinja's own escapes for HTML; a prompt is no HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime(pattern)
