"""Chats whose last message is left open: their prompts are those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.router.text.published_templates import TEMPLATES
from twinpool.contracts.errors import RequestError
from twinpool.router.openai.chat_format import messages_for
from twinpool.router.text.chat_template import ChatTemplate, cut_at_mark, marked

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
TRIMS = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[/]{% endfor %}"
KEEPS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}"
DROPS = "{% for m in messages[:-1] %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}"
SAID = ["It is", "It is ", "One:\n", "  two\n  ", "é 中 <b>", "It is It is", "[/]", "the answer goes on here"]


def talk(said: str, role: str = "assistant") -> list[dict[str, Any]]:
    return [{"role": "user", "content": "It is"}, {"role": role, "content": said}]


def ours(template: str, messages: list[dict[str, Any]]) -> str:
    return cut_at_mark(ChatTemplate(template, SPECIALS, 100_000).render(marked(messages), False, {}))


def oracle(template: str, messages: list[dict[str, Any]]) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=template, **SPECIALS)
    return str(tokenizer.apply_chat_template(messages, continue_final_message=True, tokenize=False))


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("role", ["assistant", "user"])
@pytest.mark.parametrize("template", [TRIMS, KEEPS])
def test_the_prompt_ends_with_the_last_message(template: str, role: str, said: str) -> None:
    assert ours(template, talk(said, role)) == oracle(template, talk(said, role))


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("name", TEMPLATES)
def test_each_familys_template_leaves_the_last_message_open_as_in_transformers(name: str, said: str) -> None:
    messages = messages_for(name, talk(said))
    try:
        wanted = oracle(TEMPLATES[name], messages)
    except ValueError:
        with pytest.raises(RequestError):
            ours(TEMPLATES[name], messages)
        return
    assert ours(TEMPLATES[name], messages) == wanted
    assert said.strip() in wanted


def test_a_template_that_drops_the_message_and_a_message_that_cant_be_continued_are_refused() -> None:
    with pytest.raises(RequestError, match="doesn't show the last message"):
        ours(DROPS, talk("It is"))
    for last in ({"role": "assistant", "content": " "}, {"role": "assistant", "content": "x", "tool_calls": [{}]}):
        with pytest.raises(RequestError, match="last message with text"):
            marked([*talk("a"), last])
