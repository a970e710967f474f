"""Chat templates and tokenizers as models' makers publish them, of packages that carry them: no model, no weights.

The oracles are transformers (prompts, and tokens of `tokenizer.json`) and the tokens that llama.cpp keeps beside its
vocabularies. Where the packages can't be had, the tests are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from contracts.errors import RequestError
from router.openai.chat_format import ChatFormat
from router.openai.parse_request import read_messages
from router.openai.tools import read_tools
from router.text.chat_template import ChatTemplate
from tests.soak.published import OutOfReach
from tests.soak.published_files import published_templates

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(1800)]

T = TypeVar("T")
GENERIC = "generic"
"""What the router does for a template that shows no tools: it teaches its own prompt."""
KNOWN: dict[str, str] = {}
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
ARGUMENTS: dict[str, Any] = {"city": 'Zürich "x"', "days": 3, "where": {"x": [1, None]}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "Looks up the weather.",
        "parameters": {"type": "object", "properties": {
            "city": {"type": "string", "description": "The city's name."},
            "days": {"type": "integer", "description": "How many."},
            "where": {"type": "object", "description": "More.", "properties": {}},
        }, "required": ["city"]},
    }},
]  # fmt: skip
CALL = {"id": "call_1", "type": "function",
        "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS, ensure_ascii=False)}}  # fmt: skip
TALKS: dict[str, list[dict[str, Any]]] = {
    "a question": [{"role": "user", "content": "How warm is Ōsaka 🙂?"}],
    "a system": [{"role": "system", "content": "Be very brief."}, {"role": "user", "content": "How warm is Ōsaka?"}],
    "an answer": [
        {"role": "user", "content": "How warm is Ōsaka?"},
        {"role": "assistant", "content": "Twenty degrees.", "reasoning_content": "Look outside."},
        {"role": "user", "content": "And <tomorrow>?"},
    ],
    "a call": [
        {"role": "user", "content": "How warm is Zürich?"},
        {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"degrees": 12}'},
    ],
    "a call and on": [
        {"role": "system", "content": "Be very brief."},
        {"role": "user", "content": "How warm is Zürich?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
        {"role": "assistant", "content": "Twelve."},
        {"role": "user", "content": "And in Ōsaka?"},
    ],
}  # fmt: skip


def fetched(what: Callable[[], T]) -> T:
    try:
        return what()
    except OutOfReach as error:
        pytest.skip(str(error))


@cache
def templates() -> dict[str, str]:
    return published_templates()


def in_parts(talk: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A chat with its users' texts as two parts each."""
    return [
        {**m, "content": [{"type": "text", "text": text} for text in (m["content"], "See above.")]}
        if m["role"] == "user"
        else m
        for m in talk
    ]


def transformers_of(source: str, messages: list[dict[str, Any]], tools: Any, opens: bool) -> str | None:
    """What transformers renders; None where the template refuses."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=source, **SPECIALS)
    try:
        return str(
            tokenizer.apply_chat_template(messages, tools=tools or None, add_generation_prompt=opens, tokenize=False)
        )
    except Exception:  # Templates fail in all ways that Python has.
        return None


def with_contents(messages: Sequence[dict[str, Any]], form: Callable[[list[str]], Any]) -> list[dict[str, Any]]:
    """The messages with the content of all but tools in another form, of its texts."""
    return [
        m if m["role"] == "tool" or not m.get("content") else {**m, "content": form(list(texts_of(m["content"])))}
        for m in messages
    ]


def texts_of(content: Any) -> Iterator[str]:
    yield from (part["text"] for part in content) if isinstance(content, list) else (str(content),)


def with_argument_text(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for message in made:
        for one in message.get("tool_calls") or ():
            one["function"]["arguments"] = CALL["function"]["arguments"]  # type: ignore[index]
    return made


def candidates(source: str, messages: list[dict[str, Any]], tools: Any, opens: bool) -> list[str]:
    """What transformers makes of each form of contents and of arguments that a template might take, without those in
    which Python's notation is found instead of JSON or of text."""
    found = []
    for arguments in (messages, with_argument_text(messages)):
        for form in (
            "\n".join,
            lambda texts: [{"type": "text", "text": text} for text in texts],
            lambda texts: texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts],
        ):
            text = transformers_of(source, with_contents(arguments, form), tools, opens)
            if text is not None and "{'type': 'text'" not in text and "{'city'" not in text:
                found.append(text)
    return found


def plain(value: Any) -> Any:
    """Messages as ordinary values, with texts of parts as those."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if hasattr(value, "parts"):
        return [{"type": "text", "text": part} for part in value.parts]
    return [plain(one) for one in value] if isinstance(value, list) else value


def test_every_template_is_rendered_as_transformers_renders_it() -> None:
    wrong, refused = [], []
    for name, source in fetched(templates).items():
        template = ChatTemplate(source, SPECIALS, 1_000_000)
        made = ChatFormat(source, traits=template.traits())
        use = None
        if made.tools["format"]:
            use = read_tools({"tools": TOOLS})
        for title, talk in TALKS.items():
            for sent in (talk, in_parts(talk)):
                for opens in (True, False):
                    where = f"{name}, {title}, {'parts' if sent is not talk else 'text'}, {opens}"
                    messages = made.messages(read_messages(sent), use)
                    tools = made.shown(use)
                    wanted = candidates(source, plain(messages), list(tools), opens)
                    try:
                        ours = template.render(messages, opens, {}, tools)
                    except RequestError as error:
                        refused.append(f"{name}, {title}: {error}")
                        if wanted:
                            wrong.append(f"{where}: refused: {error}")
                        continue
                    if ours not in wanted:
                        wrong.append(f"{where}: {ours[:300]!r} not {[w[:300] for w in wanted]!r}")
                    for message in sent:
                        if message["role"] == "user":
                            for text in texts_of(message["content"]):
                                if text not in ours:
                                    wrong.append(f"{where}: without {text!r}")
    print("\n".join(dict.fromkeys(refused)))
    assert not wrong, "\n".join(wrong)
