"""Chat templates: rendered as transformers renders them, and an earlier call that they write is read as that call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.router.text.published_templates import ENDS, FURTHER, TEMPLATES
from twinpool.contracts.checkpoint.tokenizer_files import TokenizerFiles
from twinpool.contracts.errors import RequestError
from twinpool.router.openai.chat_format import ChatFormat, messages_for
from twinpool.router.openai.parse_request import read_messages
from twinpool.router.openai.tools import read_tools
from twinpool.router.parsers.answer_parts import AnswerPart, ArgumentsPart, CallPart, ContentPart, ReasoningPart, joined
from twinpool.router.parsers.tool_formats import FORMATS, format_of
from twinpool.router.text.chat_template import ChatTemplate, read_chat_template

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
ARGUMENTS: dict[str, Any] = {"text": 'a "b"\n\n\\é 中', "most": 5, "where": {"x": [1, {"y": None}]}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {
        "text": {"type": "string"}, "most": {"type": "integer"}, "where": {"type": "object"},
    }}}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip
ONE_CALL = ("harmony", "llama3_json")
"""Formats with one call a message."""
TAKE_TEXT = ("deepseek_v3", "deepseek_v31")
"""Formats whose templates put the text of arguments together with others."""
OWN_IDS = ("mistral", "mistral_json", "kimi_k2")
"""Formats whose templates take ids of their own."""
WITHOUT_TEXT = ("harmony", "llama3_json", "mistral_json", "granite")
"""Formats whose templates write no text beside a call."""


def call(number: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def talk(name: str) -> list[dict[str, Any]]:
    """A question, a turn that calls, the results, an answer, and a further question."""
    calls = [call(1, "find", ARGUMENTS), *([] if name in ONE_CALL else [call(2, "now", {})])]
    said = "" if name in WITHOUT_TEXT else "I look."
    return [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": said, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": one["id"], "content": f"result {one['id']}"} for one in calls),
        {"role": "assistant", "content": "There."},
        {"role": "user", "content": "And when?"},
    ]


def as_taken(name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as the format's template takes arguments."""
    if name not in TAKE_TEXT:
        return messages
    messages = json.loads(json.dumps(messages))
    for message in messages:
        for one in message.get("tool_calls") or ():
            one["function"]["arguments"] = json.dumps(one["function"]["arguments"], ensure_ascii=False)
    return messages


def ours(name: str, messages: list[dict[str, Any]], opens: bool = True, **extra: Any) -> str:
    template = ChatTemplate(TEMPLATES[name], SPECIALS, 100_000)
    return template.render(messages_for(name, messages), opens, extra, TOOLS)


def oracle(template: str, messages: list[dict[str, Any]], opens: bool = True, **extra: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), chat_template=template, **SPECIALS
    )  # fmt: skip
    text = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=opens, tokenize=False, **extra)
    return str(text)


def parts_of(name: str, text: str) -> list[AnswerPart]:
    found = ChatFormat(TEMPLATES[name]).answer_format(read_tools({"tools": TOOLS}), "")
    assert found is not None
    parser = found.parser()
    return list(joined(parser.feed(text) + parser.finish()))


def test_every_format_has_a_template_that_tells_it() -> None:
    assert {name: format_of(template) for name, template in TEMPLATES.items()} == {name: name for name in FORMATS}


@pytest.mark.parametrize("family", FURTHER)
def test_a_family_is_shown_its_tools_and_read_as_its_template_tells(family: str) -> None:
    wanted, prompt, source = FURTHER[family]
    template = ChatTemplate(source, SPECIALS, 100_000)
    made = ChatFormat(source, traits=template.traits())
    assert made.tools == {"format": wanted, "prompt": prompt}
    use = read_tools({"tools": TOOLS})
    if wanted is None:
        with pytest.raises(RequestError, match="calls in no format known here"):
            made.answer_format(use, "")
        return
    chat = [*talk("llama3_json")[:3], {"role": "user", "content": "And when?"}]
    text = template.render(made.messages(chat, use), True, {}, made.shown(use))
    assert all(shown in text for shown in ("Where?", "And when?", '"find"', '"now"', "result call_1"))
    if prompt == "template":
        assert text == oracle(source, chat)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_with_calls_is_rendered_as_transformers_does(name: str) -> None:
    assert ours(name, talk(name)) == oracle(TEMPLATES[name], as_taken(name, messages_for(name, talk(name))))
    assert ours(name, talk(name)[:1]) == oracle(TEMPLATES[name], talk(name)[:1])
    if name not in OWN_IDS:
        assert ours(name, talk(name)) == oracle(TEMPLATES[name], as_taken(name, talk(name)))


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_for_an_earlier_call_is_read_as_that_call(name: str) -> None:
    messages = talk(name)
    before, text = ours(name, messages[:1]), ours(name, messages[:2], False)
    if not text.startswith(before):  # An earlier turn has no reasoning, which a new one begins with.
        before = before.removesuffix("<think>\n")
    assert text.startswith(before)
    answer = text[len(before) :]
    for end in ENDS:
        answer = answer.removesuffix(end)
    parts = parts_of(name, answer)
    said = "".join(part.text for part in parts if isinstance(part, ContentPart))
    assert said.strip() == messages[1]["content"]
    arguments: list[str] = []
    for part in parts:
        if isinstance(part, CallPart):
            arguments.append("")
        elif isinstance(part, ArgumentsPart):
            arguments[-1] += part.text
    names = [part.name for part in parts if isinstance(part, CallPart)]
    told = [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]
    calls = [one["function"] for one in messages[1]["tool_calls"]]
    assert told == [(one["name"], one["arguments"]) for one in calls]


def test_reasoning_before_a_call_comes_back_whatever_name_the_client_gives_it() -> None:
    for field in ("reasoning_content", "reasoning", "thinking"):
        messages = talk("harmony")[:3]
        messages[1][field] = "hm"
        text = ours("harmony", messages)
        assert "<|start|>assistant<|channel|>analysis<|message|>hm<|end|>" in text
        assert text == oracle(TEMPLATES["harmony"], messages)
        plain = "{% for m in messages %}{{ m.thinking }} {{ m.reasoning_content }} {{ m.content }}\n{% endfor %}"
        said: list[dict[str, Any]] = [{"role": "assistant", field: "hm", "content": "x"}]
        found = ChatTemplate(plain, SPECIALS, 1000).render(messages_for("", said), False, {})
        assert found == oracle(plain, said, False) == "hm hm x\n"


def test_gpt_oss_gets_each_of_several_calls_with_its_result_and_text_as_analysis() -> None:
    results: list[dict[str, Any]] = [{"role": "tool", "tool_call_id": f"call_{n}", "content": f"r{n}"} for n in (2, 1)]
    calls = [call(1, "find", {}), call(2, "now", {})]
    asked: dict[str, Any] = {"role": "user", "content": "?"}
    several = [
        asked,
        {"role": "assistant", "reasoning_content": "hm", "content": "I look.", "tool_calls": calls},
        *results,
    ]
    apart: list[dict[str, Any]] = [
        asked,
        {"role": "assistant", "thinking": "hm\n\nI look.", "content": "", "tool_calls": calls[:1]},
        results[1],
        {"role": "assistant", "content": "", "tool_calls": calls[1:]},
        results[0],
    ]
    assert ours("harmony", several) == oracle(TEMPLATES["harmony"], apart)
    parts = parts_of("harmony", ours("harmony", several).split("<|start|>assistant", 1)[1].split("<|call|>")[0])
    assert parts[0] == ReasoningPart("hm\n\nI look.")


def numbered_anew(turns: int) -> tuple[list[dict[str, Any]], list[str]]:
    """A chat whose client gives the calls of each turn the ids of the turn before, the first turn having one call; and
    what each result says, as the calls come."""
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [{**call(0, "find", {}), "id": "call_0"}]},
        {"role": "tool", "tool_call_id": "call_0", "content": "find alone"},
    ]
    order = ["find alone"]
    for turn in range(turns):
        answers = [f"{what} of turn {turn}" for what in ("find", "now")]
        results = [{"role": "tool", "tool_call_id": f"call_{n}", "content": text} for n, text in enumerate(answers)]
        calls = [{**call(0, "find", {}), "id": "call_0"}, {**call(0, "now", {}), "id": "call_1"}]
        said += [
            {"role": "user", "content": f"? {turn}"},
            {"role": "assistant", "content": "", "tool_calls": calls},
            *(results if turn % 2 else reversed(results)),
        ]
        order += answers
    return said, order


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_ids_that_come_again_in_later_turns_name_each_turns_own_calls(turns: int) -> None:
    said, order = numbered_anew(turns)
    told = messages_for("harmony", said)
    assert len(told) == len(said) + turns, "each call has a message"
    assert [m["content"] for m in told if m["role"] == "tool"] == order
    for at, message in enumerate(told):
        if message["role"] == "tool":
            (one,) = told[at - 1]["tool_calls"]
            assert message["content"].startswith(one["function"]["name"])
    for name in ("kimi_k2", "mistral"):
        calls: list[str] = []
        for message in messages_for(name, said):
            if message["role"] == "tool":
                assert message["tool_call_id"] in calls[-2:]
            calls += [one["id"] for one in message.get("tool_calls", ())]
        if name == "kimi_k2":
            names = ["find", *("find", "now") * turns]
            assert calls == [f"functions.{one}:{number}" for number, one in enumerate(names)]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}{{ messages | tojson(indent=2) }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m['content'] }}{% endfor %}",
        "{{ tools[0].function.parameters.properties.keys() | list | tojson }}{{ bos_token }}{{ undefined_name }}",
    ],
)
def test_what_templates_may_use_works_as_in_transformers(template: str) -> None:
    messages = [{"role": "user", "content": "<é>"}, {"role": "assistant", "content": "x"}]
    assert ChatTemplate(template, SPECIALS, 10_000).render(messages, False, {}, TOOLS) == oracle(
        template, messages, False
    )


_EACH = "{% for m in messages %}[{{ m.role }}]"
CONTENT_FORMS = {
    "text": _EACH + "{{ m.content }}{% endfor %}",
    "trimmed text": _EACH + "{{ m['content'] | trim }}{% endfor %}",
    "parts alone": _EACH
    + "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text | trim }}{% endif %}{% endfor %}{% endfor %}",
    "either": _EACH + "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c['type'] == 'image' %}<image>{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}",
    "either, after a system": "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    + _EACH
    + "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content | map(attribute='text') | join('|') }}"
    "{% endif %}{% endfor %}",
}
"""Templates by the content that they take: text, as most; parts, as Llama Guard's; either, as Gemma 3's and Qwen's."""


@pytest.mark.parametrize("sent", ["text", "a part", "parts"])
@pytest.mark.parametrize("name", CONTENT_FORMS)
def test_a_message_comes_whole_into_the_prompt_in_the_form_that_the_template_takes(name: str, sent: str) -> None:
    texts = ["File: a.py", "Explain it"] if sent == "parts" else ["Explain it"]
    parts = [{"type": "text", "text": text} for text in texts]
    body: list[dict[str, Any]] = [
        {"role": "user", "content": texts[0] if sent == "text" else parts},
        {"role": "assistant", "content": "So."},
    ]
    # What transformers makes of the form that the template takes.
    wanted = [dict(message) for message in body]
    if "text" in name:
        wanted[0]["content"] = "\n".join(texts)
    elif name == "parts alone":
        wanted = [{**m, "content": parts if m["role"] == "user" else [{"type": "text", "text": "So."}]} for m in body]
    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    rendered = theirs.apply_chat_template(wanted, chat_template=CONTENT_FORMS[name], tokenize=False)
    template = ChatTemplate(CONTENT_FORMS[name], SPECIALS, 10_000)
    assert template.render(read_messages(body), False, {}) == rendered
    assert all(text in rendered for text in texts)


def test_results_of_tools_are_one_text_where_a_template_takes_either() -> None:
    """Templates that take parts of users and of models often write those of tools as a list."""
    result = [{"type": "text", "text": "12"}, {"type": "text", "text": "degrees"}]
    messages = read_messages([{"role": "tool", "tool_call_id": "c", "content": result}])
    assert ChatTemplate(CONTENT_FORMS["either"], SPECIALS, 10_000).render(messages, False, {}) == "[tool]12\ndegrees"


@pytest.mark.parametrize(
    "written", ['{"town":"Zürich",\n "days": [1]}', '{"town": "Zürich", "days": [1]}', '{"town": "Zü']
)
@pytest.mark.parametrize(
    "printed", ["ARGUMENTS", "ARGUMENTS | string", "'' ~ ARGUMENTS", "'' + ARGUMENTS", "ARGUMENTS | tojson"]
)
def test_arguments_that_a_template_prints_are_json_as_it_was_written(printed: str, written: str) -> None:
    """As transformers prints the text; a template that looks into them gets an object, where theirs would fail."""
    one = {"id": "c", "type": "function", "function": {"name": "f", "arguments": written}}
    messages = read_messages([{"role": "assistant", "content": None, "tool_calls": [one]}])
    source = "{% for c in messages[0].tool_calls %}{{ " + printed + " }}{% endfor %}"
    source = source.replace("ARGUMENTS", "c.function.arguments")
    whole = written if written.endswith("}") else '{"town": "Zü"}'
    shown = json.loads(whole) if printed.endswith("tojson") else whole
    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    asked = [{**messages[0], "tool_calls": [{**one, "function": {"name": "f", "arguments": shown}}]}]
    rendered = theirs.apply_chat_template(asked, chat_template=source, tokenize=False)
    assert ChatTemplate(source, SPECIALS, 10_000).render(messages, False, {}) == rendered
    assert json.loads(rendered) == json.loads(whole)


def test_a_template_that_takes_arguments_neither_way_says_the_first_reason() -> None:
    messages = talk("hermes")
    with pytest.raises(RequestError, match='can only concatenate str \\(not "dict"\\) to str'):
        ChatTemplate("{{ 'x' + messages[1].tool_calls[0].function.arguments + 5 }}", {}, 1000).render(
            messages, True, {}
        )


@pytest.mark.parametrize("where", ["list", "file"])
def test_chats_with_tools_have_a_template_of_their_own_where_there_is_one(tmp_path: Path, where: str) -> None:
    config: dict[str, Any] = {"chat_template": "plain"}
    if where == "list":
        config["chat_template"] = [
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "<tool_call>{{ tools | length }}"},
        ]
    else:
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("<tool_call>{{ tools | length }}")
    template = read_chat_template(tmp_path, TokenizerFiles(None, {}, config), 1000)
    assert template is not None
    assert template.render([], False, {}) == "plain"
    assert template.render([], False, {}, TOOLS) == "<tool_call>2"
    assert format_of(template.source) == "hermes"


def test_a_developer_is_the_system_where_a_template_knows_none() -> None:
    said = [{"role": "developer", "content": "Be brief."}]
    assert ChatFormat("{{ messages }}").messages(said)[0]["role"] == "system"
    assert ChatFormat("{% if m.role == 'developer' %}").messages(said) == said
