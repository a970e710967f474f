"""A GGUF file's tokenizer gives the tokens that transformers' own reading of the same file gives, and those of an
independent model of SentencePiece, on prose, code, other scripts and special tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path

import gguf
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_files import CONTROL, NORMAL, write_gguf
from tests.support.served_cluster import ROOT
from twinpool.router.text.tokenizer import ModelTokenizer, read_model_tokenizer

UNKNOWN, USER_DEFINED, BYTE = 2, 4, 6
PROSE = (ROOT / "bench" / "demo_model" / "heldout.txt").read_text()[:20_000]
CODE = (ROOT / "router" / "text" / "tokenizer.py").read_text()
OTHERS = (
    "Straße, naïve café, Ελληνικά, русский, 日本語のテキスト、한국어 텍스트, العربية, हिन्दी 🙂👩‍👩‍👧 ½ ²³",
    "12345678901 3.14159 1,000,000 v2.0.1 0xFF",
    "It's we'LL I'd they've DON'T 'tis ''quoted'' \"double\"",
    "  two  spaces\t\ttabs\n\n\nlines\r\nend   ",
    "CamelCaseWords snake_case SCREAMING_CASE kebab-case http://a.b/c?d=e&f=g",
    "",
    " ",
    "\n",
)
TEXTS = (PROSE, CODE, (ROOT / "LICENSE").read_text(), *OTHERS)
MARKS = ("<|end|>", "<|user|>")
DIGITS = ("smollm", "command-r", "refact", "starcoder")
"""Those that take each digit alone. transformers knows none of them and leaves the digits together."""
SPACE = "\u2581"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gguf") / "llama")


def trained(splits: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splits
    trainer = trainers.BpeTrainer(
        vocab_size=1500, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([text for text in TEXTS if text], trainer)
    return tokenizer


def split_as(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in ("gpt-2", "mpt"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in DIGITS:
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def byte_level_file(folder: Path, file: Path, pre: str, tokenizer: Tokenizer) -> Path:
    tree = json.loads(tokenizer.to_str())["model"]
    tokens = [*sorted(tree["vocab"], key=lambda token: int(tree["vocab"][token])), *MARKS, "<think>"]

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([NORMAL] * (len(tokens) - 3) + [CONTROL] * 2 + [USER_DEFINED])
        writer.add_token_merges([" ".join(pair) for pair in tree["merges"]])
        writer.add_bos_token_id(len(tokens) - 2)
        writer.add_eos_token_id(len(tokens) - 3)
        writer.add_add_bos_token(False)
        writer.add_chat_template("{% for m in messages %}<|user|>{{ m.content }}{% endfor %}")

    return write_gguf(folder, file, "llama", tokenizer=write)


def marked(text: str) -> str:
    return f"<|user|>{text}<|end|><think>{text}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o", "qwen35", "mpt", *DIGITS[1:]]
)
def test_byte_level_tokens_are_those_of_transformers(folder: Path, tmp_path: Path, pre: str) -> None:
    original = trained(split_as(pre))
    file = byte_level_file(folder, tmp_path / "model.gguf", pre, original)
    mine, theirs = read_model_tokenizer(file, 100_000), AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in TEXTS:
        found = list(mine.encode(text, add_special=False))
        assert found == original.encode(text).ids, text
        if pre not in DIGITS:
            assert found == theirs(text, add_special_tokens=False)["input_ids"], text
            both = theirs(marked(text), add_special_tokens=False)["input_ids"]
            assert list(mine.encode(marked(text), add_special=False)) == both
        assert mine.decode(found) == text == read_back(mine, found)
    assert mine.marks == {"<|end|>": 1500, "<|user|>": 1501, "<think>": 1502}
    assert mine.decode((1500, 1502), skip_special=True) == "<think>", "it is the user's text, though a mark"


def read_back(tokenizer: ModelTokenizer, tokens: list[int]) -> str:
    return b"".join(tokenizer.token_bytes(token) for token in tokens).decode()


def test_chats_are_rendered_by_the_files_template(folder: Path, tmp_path: Path) -> None:
    file = byte_level_file(folder, tmp_path / "model.gguf", "gpt-2", trained(split_as("gpt-2")))
    mine = read_model_tokenizer(file, 1000)
    assert mine.render([{"role": "user", "content": "hello"}], True, {}) == "<|user|>hello"


@pytest.mark.parametrize(("flag", "wanted"), [(None, True), (True, True), (False, False)])
def test_llama_3_texts_begin_with_the_first_token_unless_the_file_says_no(
    folder: Path, tmp_path: Path, flag: bool | None, wanted: bool
) -> None:
    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("llama-bpe")
        writer.add_token_list(["<s>", "a", "b", "ab", "</s>", "zab"])
        writer.add_token_types([CONTROL, NORMAL, NORMAL, NORMAL, CONTROL, NORMAL])
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(4)
        writer.add_add_eos_token(True)
        if flag is not None:
            writer.add_add_bos_token(flag)

    mine = read_model_tokenizer(write_gguf(folder, tmp_path / "model.gguf", "llama", tokenizer=write), 100)
    assert mine.encode("ab", add_special=True) == ((0, 3, 4) if wanted else (3, 4))
    assert mine.encode("ab", add_special=False) == (3,)
    assert mine.encode("zab", add_special=False) == (5,), "a word that is a token is taken whole"


# ---------------------------------------------------------------- SentencePiece


def pieces(*, shuffled: bool = True) -> tuple[list[str], list[float], list[int]]:
    """A vocabulary with SentencePiece's scores: the first three, bytes, then pieces and letters, which the best first
    unless they are `shuffled`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=900, show_progress=False, limit_alphabet=90)
    tokenizer.train_from_iterator([PROSE, CODE], trainer)
    vocab = tokenizer.get_vocab()
    learned = sorted(vocab, key=lambda token: vocab[token])
    letters, merged = [t for t in learned if len(t) == 1], [t for t in learned if len(t) > 1]
    rated = [(token, -float(rank)) for rank, token in enumerate([*merged, *letters])]
    if shuffled:
        random.Random(0).shuffle(rated)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(token for token, _ in rated)]
    scores = [0.0] * 259 + [score for _, score in rated]
    return tokens, scores, [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 259)


def sentencepiece_file(folder: Path, file: Path, architecture: str = "llama", prefix: bool | None = None) -> Path:
    tokens, scores, kinds = pieces(shuffled=architecture == "llama")

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        if prefix is not None:
            writer.add_add_space_prefix(prefix)

    return write_gguf(folder, file, architecture, tokenizer=write)


def plain_sentencepiece(text: str, tokens: list[str], scores: list[float], prefix: bool) -> list[int]:
    """SentencePiece's own way, without merges: join the two neighbours that make the piece of the highest score, the
    first of equals, until none do; what is no piece is its bytes."""
    numbers = {token: number for number, token in enumerate(tokens)}
    parts = list((SPACE if prefix and text else "") + text.replace(" ", SPACE))
    while True:
        joined = [
            (scores[numbers[both]], -at)
            for at in range(len(parts) - 1)
            if (both := parts[at] + parts[at + 1]) in numbers
        ]
        if not joined:
            break
        at = -max(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found: list[int] = []
    for part in parts:
        found += [numbers[part]] if part in numbers else [3 + byte for byte in part.encode()]
    return found


SHORT = (PROSE[:600], CODE[:600], *OTHERS)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [None, False])
def test_sentencepiece_tokens_are_those_of_its_own_way(folder: Path, tmp_path: Path, prefix: bool | None) -> None:
    tokens, scores, _ = pieces()
    mine = read_model_tokenizer(sentencepiece_file(folder, tmp_path / "model.gguf", prefix=prefix), 100_000)
    for text in SHORT:
        found = list(mine.encode(text, add_special=False))
        assert found == plain_sentencepiece(text, tokens, scores, prefix is None), text
        assert mine.decode(found) == text
    assert mine.encode("the", add_special=True)[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_sentencepiece_tokens_are_those_of_transformers(folder: Path, tmp_path: Path, architecture: str) -> None:
    file = sentencepiece_file(folder, tmp_path / "model.gguf", architecture)
    mine, theirs = read_model_tokenizer(file, 100_000), AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in (*TEXTS, *SHORT):
        if text.startswith(" ") and architecture == "llama":
            continue  # transformers sets no mark before a space; llama.cpp and the model's own tokenizer do.
        assert list(mine.encode(text, add_special=False)) == theirs(text, add_special_tokens=False)["input_ids"], text
    text = "<s>the house</s> of"
    if architecture == "gemma3":
        assert list(mine.encode(text, add_special=False)) == theirs(text, add_special_tokens=False)["input_ids"]


def test_runs_of_spaces_that_are_tokens_are_found(folder: Path, tmp_path: Path) -> None:
    """Gemma's files have them as spaces, in a vocabulary whose texts have marks."""

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", SPACE, "a", "  ", f"{SPACE}a"])
        writer.add_token_scores([0.0, -4.0, -3.0, -1.0, -2.0])
        writer.add_token_types([UNKNOWN, NORMAL, NORMAL, USER_DEFINED, NORMAL])
        writer.add_unk_token_id(0)

    mine = read_model_tokenizer(write_gguf(folder, tmp_path / "model.gguf", "gemma3", tokenizer=write), 100)
    assert mine.encode("a  a a", add_special=False) == (2, 3, 2, 4)
    assert mine.decode([2, 3, 2, 4]) == "a  a a"
