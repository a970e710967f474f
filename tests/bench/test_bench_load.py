"""The load is the same for the same seed, and says what it was asked to say."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from bench.common.load_client import LengthRange, synthetic
from twinpool.cli.load.open_loop import Ask, Content, asks_of
from twinpool.sim.scale.traffic import TraceLine, read_trace

CONTENT = Content(seed=1, low=300, high=2000)
SLICE = Path(__file__).parents[2] / "bench" / "traces" / "conversation_200.jsonl"


def common(a: Ask, b: Ask) -> int:
    """Length of the common prefix."""
    pairs = zip(a.tokens, b.tokens, strict=False)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(a.tokens), len(b.tokens)))


def test_a_seed_gives_one_schedule_and_another_seed_another() -> None:
    def build(seed: int) -> list[Ask]:
        ranges = LengthRange(10, 90), LengthRange(1, 5)
        return synthetic(Content(seed, 300, 2000), 20, *ranges, shared_prefix=8, rate=5.0)

    assert build(1) == build(1)
    assert build(1) != build(2)


def test_lengths_ids_and_arrivals_stay_within_what_was_asked() -> None:
    asks = synthetic(CONTENT, 400, LengthRange(10, 90), LengthRange(2, 5), rate=50.0)
    assert {len(a.tokens) for a in asks} <= set(range(10, 91))
    assert {a.output_tokens for a in asks} == {2, 3, 4, 5}
    assert all(300 <= token < 2000 for a in asks for token in a.tokens)
    assert all(x.at_s <= y.at_s for x, y in itertools.pairwise(asks))
    assert 400 / asks[-1].at_s == pytest.approx(50.0, rel=0.2)


def test_a_shared_prefix_is_shared_by_all_and_no_more_is() -> None:
    asks = synthetic(CONTENT, 5, LengthRange(700, 700), LengthRange(1, 1), shared_prefix=600)
    for other in asks[1:]:
        assert 600 <= common(asks[0], other) < 603


def test_equal_hash_ids_are_equal_content_whatever_the_scale() -> None:
    lines = [
        TraceLine(10.0, 1300, 5, (0, 1, 2)),
        TraceLine(11.0, 1100, 5, (0, 1, 3)),
        TraceLine(14.0, 1300, 5, (9, 1, 2)),
    ]
    for scale in (1.0, 0.1, 0.013, 2.0):
        first, second, third = asks_of(CONTENT, lines, scale=scale)
        assert len(first.tokens) == round(1300 * scale)
        assert 2 * round(512 * scale) <= common(first, second) <= 2 * round(512 * scale) + 2
        assert common(first, third) <= 2


def test_speed_divides_the_gaps_and_the_first_is_due_at_once() -> None:
    lines = [TraceLine(10.0, 5, 5, (0,)), TraceLine(14.0, 5, 5, (1,))]
    assert [a.at_s for a in asks_of(CONTENT, lines, speed=8.0)] == [0.0, 0.5]


def test_a_trace_cut_to_a_context_fits_it() -> None:
    asks = list(asks_of(CONTENT, read_trace(SLICE), max_context=256))
    assert len(asks) == 200
    assert all(len(a.tokens) >= 1 and len(a.tokens) + a.output_tokens <= 256 for a in asks)


def test_text_has_the_words_that_were_measured_to_make_the_tokens() -> None:
    (ask,) = synthetic(Content(1, 300, 2000, per_token=0.5), 1, LengthRange(100, 100), LengthRange(1, 1))
    assert len(ask.text().split()) == 50


@pytest.mark.parametrize("text", ["", "0", "5:3", "a", "1:2:3", "-1"])
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        LengthRange.parse(text)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        json.dumps({"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}),
        json.dumps({"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}),
        json.dumps({"timestamp": 0, "input_length": 5, "output_length": 1}),
    ],
)
def test_a_bad_trace_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    good = json.dumps({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]})
    path.write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match="line 2 is not a trace request"):
        read_trace(path)
    assert len(read_trace(path, 1)) == 1
