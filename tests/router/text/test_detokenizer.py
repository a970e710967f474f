"""Pieces of a stream joined are the text of the whole, character for character; stop strings don't depend on cuts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from tests.router.http_server import DEMO
from twinpool.router.text.detokenizer import StopMatcher, WindowDetokenizer
from twinpool.router.text.tokenizer import ModelTokenizer, read_model_tokenizer

WORDS = "Grüße, 你好 👩‍👩‍👧 — naïve café\n\t𝔘𝔫𝔦 ∑ ﷽ — the end"


@pytest.fixture(scope="module")
def model_tokenizer() -> ModelTokenizer:
    return read_model_tokenizer(DEMO, 10_000)


def sentencepiece(tmp_path: Path, special: str = "") -> ModelTokenizer:
    """A tokenizer of the other kind: metaspace and byte fallback."""
    vocab = {"<unk>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}}
    for piece in ("\u2581the", "\u2581", "end", "\u2581caf", "é", "ü", "\u2581你", "好", "s", "t"):
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    if special:
        tokenizer.add_special_tokens([special])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return read_model_tokenizer(tmp_path, 10_000)


def streamed(
    model_tokenizer: ModelTokenizer, tokens: list[int], prompt: tuple[int, ...] = (), **options: Any
) -> tuple[str, list[str]]:
    detokenizer = model_tokenizer.detokenizer(prompt, skip_special=options.get("skip_special", True))
    pieces = [detokenizer.feed(t) for t in tokens]
    return "".join(pieces) + detokenizer.finish(), pieces


def test_random_tokens_stream_as_they_decode_whole(model_tokenizer: ModelTokenizer) -> None:
    rng = random.Random(1)
    for _ in range(300):
        tokens = [rng.randrange(1200) for _ in range(rng.randrange(40))]
        for skip in (True, False):
            text, _ = streamed(model_tokenizer, tokens, skip_special=skip)
            assert text == model_tokenizer.decode(tokens, skip_special=skip)


def test_random_bytes_stream_as_they_decode_whole(model_tokenizer: ModelTokenizer) -> None:
    single = [t for t in range(400) if len(model_tokenizer.token_bytes(t)) == 1]
    assert len(single) >= 200
    rng = random.Random(2)
    high = [t for t in single if model_tokenizer.token_bytes(t)[0] >= 0x80]
    for _ in range(500):
        tokens = [rng.choice(high if rng.random() < 0.8 else single) for _ in range(rng.randrange(30))]
        text, _ = streamed(model_tokenizer, tokens)
        assert text == model_tokenizer.decode(tokens)


def test_tokens_that_come_together_have_the_text_that_they_have_one_by_one(
    model_tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    rng = random.Random(3)
    for tokenizer, count in ((model_tokenizer, 1200), (sentencepiece(tmp_path), 267)):
        for _ in range(100):
            tokens = [rng.randrange(count) for _ in range(rng.randrange(1, 12))]
            cut = rng.randrange(len(tokens) + 1)
            together = tokenizer.detokenizer((), skip_special=True)
            text = together.feed_all(tokens[:cut]) + together.feed_all(tokens[cut:]) + together.finish()
            assert text == streamed(tokenizer, tokens)[0]


def test_no_piece_holds_half_a_character(model_tokenizer: ModelTokenizer) -> None:
    tokens = list(model_tokenizer.encode(WORDS * 3, add_special=False))
    assert any(
        b"" != model_tokenizer.token_bytes(t) != model_tokenizer.token_bytes(t).decode("utf-8", "ignore").encode()
        for t in tokens
    )
    text, pieces = streamed(model_tokenizer, tokens)
    assert text == WORDS * 3
    assert not any("\ufffd" in p for p in pieces)


def test_a_character_that_never_ends_is_shown_at_the_end(model_tokenizer: ModelTokenizer) -> None:
    tokens = list(model_tokenizer.encode("好", add_special=False))
    cut = [t for t in range(400) if model_tokenizer.token_bytes(t) == "好".encode()[:1]] or tokens[:1]
    text, pieces = streamed(model_tokenizer, cut)
    assert pieces == [""]
    assert text == "\ufffd" == model_tokenizer.decode(cut)


def test_other_tokenizers_stream_through_a_window(tmp_path: Path) -> None:
    model_tokenizer = sentencepiece(tmp_path)
    prompt = model_tokenizer.encode(" the", add_special=False)
    rng = random.Random(3)
    words = [list(model_tokenizer.encode(w, add_special=False)) for w in ("the", " é", "好", " 👩", "ü", "s", " caf")]
    for _ in range(200):
        tokens = [t for _ in range(rng.randrange(12)) for t in rng.choice(words)]
        text, pieces = streamed(model_tokenizer, tokens, prompt)
        assert text == model_tokenizer.decode([*prompt, *tokens])[len(model_tokenizer.decode(prompt)) :]
        assert not any("\ufffd" in p for p in pieces)


@pytest.mark.parametrize("at", range(-1, 12))
def test_characters_of_bytes_stream_whole_wherever_the_prompt_ends(at: int, tmp_path: Path) -> None:
    """As many as a window has tokens, and more: emoji alone, beside other characters of bytes, beside words."""
    model_tokenizer = sentencepiece(tmp_path)
    rng = random.Random(at)
    words = [" the", "🙂", "🙂🙂🙂", "日本語", "👩‍👩‍👧", " é", "好", "€", "s"]
    for _ in range(60):
        prompt, text = rng.choice(["", " the", "🙂🙂", " the 語"]), "".join(rng.choices(words, k=rng.randrange(1, 9)))
        tokens = model_tokenizer.encode(prompt + text, add_special=False)
        cut = len(model_tokenizer.encode(prompt, add_special=False)) + max(at, 0)
        found, pieces = streamed(model_tokenizer, list(tokens[cut:]), tokens[:cut])
        assert not any("\ufffd" in piece for piece in pieces)
        if at <= 0:
            whole = model_tokenizer.decode(tokens)
            assert found == whole[len(model_tokenizer.decode(tokens[:cut])) :]
            assert whole.removeprefix(" ") == (prompt + text).removeprefix(" ")
        else:  # Within a character: the text from that character on.
            assert (prompt + text).endswith(found)


def test_bytes_that_are_no_text_are_a_mark_each_from_where_that_shows(tmp_path: Path) -> None:
    """transformers makes a mark of each byte of such a run, which a stream can't do of what is out."""
    model_tokenizer = sentencepiece(tmp_path)
    word, rng = model_tokenizer.encode("the", add_special=False)[0], random.Random(5)

    def text_of(run: bytes) -> str:
        good = max(n for n in range(len(run) + 1) if _is_text(run[:n]))
        return run.decode() if good == len(run) else run[:good].decode() + "\ufffd" * (len(run) - good)

    for _ in range(300):
        runs = [bytes(rng.choices(b"a\xc3\xa9\xf0\x9f\x99\x82\xff", k=rng.randrange(1, 7))) for _ in range(3)]
        tokens = [token for run in runs for token in (*(byte + 1 for byte in run), word)]
        found, _ = streamed(model_tokenizer, tokens)
        assert found == "".join(text_of(run) + model_tokenizer.token_bytes(word).decode() for run in runs)
        if all(_is_text(run) or not any(_is_text(run[:n]) for n in range(1, len(run))) for run in runs):
            assert found == model_tokenizer.decode(tokens)


def _is_text(run: bytes) -> bool:
    try:
        run.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_tokens_without_text_end_no_character(tmp_path: Path) -> None:
    model_tokenizer = sentencepiece(tmp_path, special="<mark>")
    (mark,) = model_tokenizer.marks.values()
    first, *rest = (byte + 1 for byte in "🙂".encode())
    assert streamed(model_tokenizer, [first, mark, *rest])[0] == "🙂"
    assert streamed(model_tokenizer, [first, mark], skip_special=False)[0] == "\ufffd<mark>"


@pytest.mark.parametrize("prompt", ["", "<mark>", "<mark><mark>"])
def test_the_first_token_with_text_begins_the_text_though_the_prompt_has_tokens_without(
    prompt: str, tmp_path: Path
) -> None:
    """Such decoders drop a blank at the beginning; a token of where texts begin has no text itself."""
    model_tokenizer = sentencepiece(tmp_path, special="<mark>")
    (mark,) = model_tokenizer.marks.values()
    before = (mark,) * prompt.count("<mark>")
    for tokens in ([0x20 + 1, ord("e") + 1], [*model_tokenizer.encode(" end", add_special=False)]):
        whole = model_tokenizer.decode([*before, *tokens], skip_special=True)
        assert streamed(model_tokenizer, tokens, before)[0] == whole
        assert not whole.startswith(" ")


@pytest.mark.parametrize("letters", ["🙂🙂🙂", "end 🙂"])
def test_stop_strings_of_bytes_are_found(letters: str, tmp_path: Path) -> None:
    model_tokenizer = sentencepiece(tmp_path)
    matcher = StopMatcher([letters])
    detokenizer = model_tokenizer.detokenizer((), skip_special=True)
    tokens = model_tokenizer.encode("s" + letters + letters, add_special=False)
    assert "".join(matcher.feed(detokenizer.feed(token)) for token in tokens if matcher.matched is None) == "s"
    assert matcher.matched == letters


def test_a_window_does_not_hold_damage_for_ever() -> None:
    detokenizer = WindowDetokenizer(lambda tokens: "\ufffd" * len(tokens))
    pieces = [detokenizer.feed(1) for _ in range(30)]
    assert "".join(pieces) + detokenizer.finish() == "\ufffd" * 30


def test_without_a_tokenizer_tokens_still_flow(tmp_path: Path) -> None:
    model_tokenizer = read_model_tokenizer(tmp_path, 1000)
    assert not model_tokenizer.has_text
    assert streamed(model_tokenizer, [1, 2, 3]) == ("", ["", "", ""])


def test_special_tokens_that_mark_something_have_text_where_others_have_none(model_tokenizer: ModelTokenizer) -> None:
    mark, other = sorted(model_tokenizer._special)[:2]
    name = model_tokenizer.token_piece(mark)
    detokenizer = model_tokenizer.detokenizer((), skip_special=True, shown={name})
    text = "".join(detokenizer.feed(token) for token in (other, mark)) + detokenizer.finish()
    assert text == name


def test_special_tokens_have_no_text_unless_asked(model_tokenizer: ModelTokenizer) -> None:
    special = min(model_tokenizer._special)
    assert streamed(model_tokenizer, [special])[0] == ""
    shown = streamed(model_tokenizer, [special], skip_special=False)[0]
    assert shown == json.loads((DEMO / "tokenizer.json").read_text())["added_tokens"][0]["content"]


# ---------------------------------------------------------------- stop strings


def reference(text: str, stops: list[str], include: bool) -> str:
    """Character by character: the answer ends where a stop string is first complete; of several, the longest."""
    for end in range(1, len(text) + 1):
        matches = [s for s in stops if text[:end].endswith(s)]
        if matches:
            return text[:end] if include else text[: end - len(max(matches, key=len))]
    return text


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_match_alike_however_the_text_is_cut(include: bool) -> None:
    rng = random.Random(4)
    for _ in range(2000):
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(25)))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randrange(1, 6))) for _ in range(rng.randrange(1, 4))]
        matcher = StopMatcher(stops, include=include)
        shown, rest = "", text
        while rest and matcher.matched is None:
            size = rng.randrange(1, 5)
            shown += matcher.feed(rest[:size])
            rest = rest[size:]
            assert reference(text, stops, include).startswith(shown), "what is shown is never taken back"
        assert shown + matcher.finish() == reference(text, stops, include)


def test_text_that_cannot_begin_a_stop_is_shown_at_once() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.feed("hello s") == "hello "
    assert matcher.feed("t") == ""
    assert matcher.feed("ay") == "stay"
    assert matcher.finish() == ""
