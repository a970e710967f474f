"""Prompt lookup: what followed the latest tokens the last time is their draft."""

from __future__ import annotations

import random

import pytest

from twinpool.contracts.block_hash import PICTURE_KEYS
from twinpool.decode import drafting
from twinpool.decode.drafting import NGRAM, PromptLookup


def looked_for(tokens: list[int], most: int) -> list[int]:
    """The draft by looking through all tokens, from behind."""
    wanted = tokens[-NGRAM:]
    for end in range(len(tokens) - 1, NGRAM - 1, -1):
        if tokens[end - NGRAM : end] == wanted:
            grown = list(tokens)
            for at in range(end, end + most):
                grown.append(grown[at])
            return grown[len(tokens) :]
    return []


@pytest.mark.parametrize("seed", range(6))
def test_drafts_are_what_followed_the_same_tokens_last(seed: int) -> None:
    rng = random.Random(seed)
    tokens = [rng.randrange(3) for _ in range(rng.randrange(12))]
    lookup = PromptLookup(tokens)
    drafts = 0
    for _ in range(200):
        most = rng.randrange(6)
        draft = lookup.propose(most)
        assert draft == (looked_for(tokens, most) if len(tokens) >= NGRAM else [])
        drafts += len(draft)
        tokens += [rng.randrange(3 if rng.random() < 0.9 else 1 << 20) for _ in range(rng.randrange(4))]
    assert drafts > 100


def test_no_draft_reaches_into_a_picture() -> None:
    keys = [PICTURE_KEYS + 7, 2 * PICTURE_KEYS - 1]
    assert PromptLookup([1, 2, 3, 4, *keys, 5, 1, 2, 3]).propose(6) == [4]
    assert PromptLookup([*keys, 3, 4, *keys, 3]).propose(6) == [4]


def test_what_repeats_itself_goes_on() -> None:
    assert PromptLookup([1, 2, 3, 4, 1, 2, 3]).propose(7) == [4, 1, 2, 3, 4, 1, 2]
    assert PromptLookup([5, 5, 5, 5]).propose(3) == [5, 5, 5]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3], [1, 2, 3, 4, 5]])
def test_without_a_repetition_there_is_no_draft(tokens: list[int]) -> None:
    assert PromptLookup(tokens).propose(4) == []


def test_a_long_prompt_is_looked_at_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "_AT_ONCE", 10)
    tokens = [*range(100, 140), 7, 8, 9, 1, 2, 7, 8, 9]
    lookup = PromptLookup(tokens)
    assert [lookup.propose(2) for _ in range(5)] == [[], [], [], [], [1, 2]]


def test_only_the_latest_positions_are_looked_at_and_the_index_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "_REACH", 20)
    far = PromptLookup([7, 8, 9, 1, *range(100, 130), 7, 8, 9])
    assert far.propose(1) == []
    tokens = [7, 8, 9]
    growing = PromptLookup(tokens)
    for token in range(1000, 1200):
        tokens.append(token)
        growing.propose(1)
        assert len(growing._behind) <= 41
    tokens += tokens[-10:-7]
    assert growing.propose(2) == tokens[-10:-8], "what was said last is found"


def test_what_is_within_reach_is_found_however_often_the_index_was_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "_REACH", 20)
    for size in range(40, 100):
        tokens = [0, 0, 0]
        growing = PromptLookup(tokens)
        for token in range(1000, 1000 + size):
            tokens.append(token)
            growing.propose(1)
        tokens += tokens[-15:-12]
        assert growing.propose(2) == tokens[-15:-13]
