"""A checkpoint's tokenizer is that of all its files, as transformers reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

from tests.router.parsers.test_harmony import byte_tokenizer
from tests.router.parsers.test_published_marks import sentencepiece_tokenizer
from twinpool.contracts.checkpoint.tokenizer_files import read_tokenizer_files
from twinpool.contracts.errors import CheckpointError
from twinpool.router.text.tokenizer import read_model_tokenizer

TURNS = ("<|im_start|>", "<|im_end|>")
TEXTS = ("hello there", "a <|im_start|>b<|im_end|> c", "<s>x</s> y", "é 🙂 <|im_end|>")
PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast"}
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}{{ eos_token }}{% endfor %}"


def flags(content: str, **changed: bool) -> dict[str, Any]:
    found = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"content": content, **found, "special": True} | changed


def decoder(tokenizer: Tokenizer, **changed: bool) -> dict[str, Any]:
    begin = tokenizer.get_vocab_size()
    return {str(begin + at): flags(name, **changed) for at, name in enumerate(TURNS)}


def kept(tokenizer: Tokenizer) -> dict[str, Any]:
    return {str(number): flags(token.content) for number, token in tokenizer.get_added_tokens_decoder().items()}


@pytest.fixture(params=["byte level", "byte fallback"])
def bare(request: pytest.FixtureRequest) -> Tokenizer:
    """A tokenizer with `<s>` and `</s>` and without the marks of turns."""
    return (byte_tokenizer if request.param == "byte level" else sentencepiece_tokenizer)(("<s>", "</s>"), ())


def with_turns(tokenizer: Tokenizer, **changed: bool) -> Tokenizer:
    tokenizer.add_tokens([AddedToken(name, normalized=False, **changed) for name in TURNS])
    return tokenizer


CASES: dict[str, Any] = {
    "all in tokenizer.json": lambda t: (with_turns(t), NAMED, {}),
    "specials in special_tokens_map.json": lambda t: (
        with_turns(t), {}, {"special_tokens_map.json": {"bos_token": flags("<s>"), "eos_token": "</s>"}},
    ),
    "the map counts before the config": lambda t: (
        with_turns(t), NAMED, {"special_tokens_map.json": {"bos_token": "</s>", "eos_token": "<s>"}},
    ),
    "tokens in added_tokens_decoder": lambda t: (t, {**NAMED, "added_tokens_decoder": kept(t) | decoder(t)}, {}),
    "tokens that take blanks": lambda t: (
        t, {**NAMED, "added_tokens_decoder": kept(t) | decoder(t, lstrip=True, rstrip=True)}, {},
    ),
    "special by added_tokens_decoder": lambda t: (
        with_turns(t), {**NAMED, "added_tokens_decoder": {
            str(n): flags(token.content) for n, token in t.get_added_tokens_decoder().items()}}, {},
    ),
    "special by additional_special_tokens": lambda t: (
        with_turns(t), {**NAMED, "additional_special_tokens": list(TURNS)}, {},
    ),
    "special by extra_special_tokens": lambda t: (with_turns(t), {**NAMED, "extra_special_tokens": list(TURNS)}, {}),
    "an end that is no special token": lambda t: (with_turns(t), {**NAMED, "eos_token": "<|im_end|>"}, {}),
    "tokens in added_tokens.json": lambda t: (
        t, NAMED, {"added_tokens.json": {name: t.get_vocab_size() + at for at, name in enumerate(TURNS)}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_texts_are_tokenised_and_read_back_as_transformers_does(bare: Tokenizer, name: str, tmp_path: Path) -> None:
    tokenizer, config, files = CASES[name](bare)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**PLAIN, **config, "chat_template": CHAT}))
    for file, content in files.items():
        (tmp_path / file).write_text(json.dumps(content))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    theirs, mine = AutoTokenizer.from_pretrained(tmp_path), read_model_tokenizer(tmp_path, 10_000)
    for text in TEXTS:
        tokens = theirs(text)["input_ids"]
        assert list(mine.encode(text, add_special=True)) == tokens, text
        assert mine.decode(tokens, skip_special=True) == theirs.decode(tokens, skip_special_tokens=True), text
        detokenizer = mine.detokenizer((), skip_special=True)
        shown = "".join(map(detokenizer.feed, tokens)) + detokenizer.finish()
        assert shown == theirs.decode(tokens, skip_special_tokens=True), text
    chat = [{"role": "user", "content": "hello"}]
    assert mine.render(chat, False, {}) == theirs.apply_chat_template(chat, tokenize=False)


@pytest.mark.parametrize(
    "template",
    [
        "{{ sep_token }}|{{ image_token }}|{{ messages[0].content }}",
        "{% if documents is not none %}DOCS{% endif %}{% if tools is not none %}TOOLS{% endif %}x",
        "{% if bos_token is defined %}D{% endif %}{% if pad_token is defined %}P{% endif %}x",
    ],
)
def test_templates_have_the_names_that_transformers_gives_them(bare: Tokenizer, template: str, tmp_path: Path) -> None:
    with_turns(bare).save(str(tmp_path / "tokenizer.json"))
    extra = {"sep_token": "</s>", "extra_special_tokens": {"image_token": "<|im_end|>"}}
    config = {**PLAIN, **NAMED, **extra, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    chat = [{"role": "user", "content": "hello"}]
    rendered = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(chat, tokenize=False)
    assert read_model_tokenizer(tmp_path, 10_000).render(chat, False, {}) == rendered


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_file_that_is_none_is_named(bare: Tokenizer, name: str, content: str, tmp_path: Path) -> None:
    bare.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        read_tokenizer_files(tmp_path)
