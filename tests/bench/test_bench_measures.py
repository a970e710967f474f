"""The benches measure what they say: every way delivers the bytes, every side the tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from bench.cache import copy_speed as copies
from bench.engine import engine_speed as engine
from bench.serving import handover_speed as handover
from bench.serving.transfer_ways import BETWEEN_PROCESSES, DISTINCT, Memory, Shape, make_reader, make_writer, plain
from tests.support.bare_engine import Answer

ROOT = Path(__file__).resolve().parents[2]
SHAPE = Shape(layers=2, kv_heads=2, head_dim=16, page_tokens=4, chunk_tokens=8)


@pytest.mark.parametrize("way", BETWEEN_PROCESSES)
def test_every_way_delivers_the_bytes_of_every_chunk(way: str) -> None:
    memory = Memory(SHAPE, seed=1, allocate=plain, noise=True)
    reader = make_reader(way, SHAPE)
    try:
        writer = make_writer(way, memory, reader.describe())
        try:
            arrived = 0
            for number in range(DISTINCT):
                writer.send(number)
                writer.finish()
                for _ in range(10):
                    arrived += reader.receive()
                    if arrived > number:
                        break
            assert arrived == DISTINCT
            assert reader.sums() == memory.sums()
            assert len(set(memory.sums())) == DISTINCT
        finally:
            writer.close()
    finally:
        reader.close()


@pytest.mark.slow
def test_planes_are_measured_between_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "BETWEEN_PROCESSES", ("shm",))
    monkeypatch.setattr(handover, "table", lambda shape, results: "")
    out = tmp_path / "out.json"
    shape = ["--layers", "2", "--kv-heads", "2", "--head-dim", "16", "--page-tokens", "4", "--chunk-tokens", "8"]
    assert handover.main([*shape, "--rounds", "2", "--chunks", "4", "--json", str(out)]) == 0
    ways = json.loads(out.read_text())["ways"]
    assert set(ways) == {"memcpy", "local", "tags (digest)", "shm"}
    assert all(len(w["gb_per_s"]) == len(w["chunk_ms"]) == 2 and w["median_gb_per_s"] > 0 for w in ways.values())


@pytest.mark.slow
def test_copies_of_every_kind_of_state_are_measured_and_compared(tmp_path: Path) -> None:
    """The other shapes are of keys and values as well, and larger."""
    out, kinds = tmp_path / "out.json", ["demo", "latent", "state"]
    assert copies.main(["--mib", "1", "--rounds", "1", "--json", str(out), "--shapes", *kinds]) == 0
    by_shape = json.loads(out.read_text())["gb_per_s"]
    assert list(by_shape) == kinds
    for ways in by_shape.values():
        assert "memcpy" in ways
        assert all(rate > 0 for by_pattern in ways.values() for rates in by_pattern.values() for rate in rates)


def test_a_copy_that_went_wrong_has_no_speed() -> None:
    copying = copies.Copying(copies.SHAPES["demo"], 2**18, "scattered")
    copying.compare()
    copying.ends[1][0], copying.ends[1][1] = copying.ends[1][1], copying.ends[1][0]
    with pytest.raises(RuntimeError, match="what was copied differs"):
        copying.compare()


@pytest.mark.slow
def test_the_engine_is_measured_beside_both_of_transformers(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = ["--prefill-tokens", "24", "--context", "9", "--output-tokens", "4", "--batches", "1", "3"]
    sides = ["--sides", "invariant", "generate", "continuous"]
    assert engine.main([*sizes, *sides, "--dtype", "float32", "--repeats", "1", "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    assert list(written["tokens_per_s"]) == ["prefill of 24", "decode, batch 1", "decode, batch 3"]
    assert all(side["median"] > 0 for by_side in written["tokens_per_s"].values() for side in by_side.values())
    assert set(written["same_tokens"].values()) == {1.0}, "in float32 all sides agree on these few tokens"


def test_decode_is_counted_from_when_the_last_sequence_has_begun() -> None:
    answer = Answer([[1, 2, 3], [1, 2, 3]], [[0.1, 0.4, 0.9], [0.5, 0.7, 1.0]])
    assert answer.prefilled_s == 0.5
    assert answer.decode_tokens_per_s == pytest.approx(3 / 0.5)


def test_a_checkpoint_too_short_for_the_measurement_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine.main(["--prefill-tokens", "4096"]) == 2
    assert "don't fit the checkpoint's context of 2048" in capsys.readouterr().err


class SmallSide:
    """A side that has memory for so many sequences; its tokens are what `shift` says."""

    def __init__(self, name: str, most: int, shift: int = 0) -> None:
        self.name, self._most, self._shift = name, most, shift

    def run(self, prompts: Sequence[Sequence[int]], count: int) -> Answer:
        if len(prompts) > self._most:
            raise torch.OutOfMemoryError("so many")
        times = [float(n + 1) for n in range(count)]
        return Answer([[n + self._shift for n in range(count)] for _ in prompts], [times for _ in prompts])

    def close(self) -> None: ...


def test_a_side_without_memory_for_a_scenario_is_left_out_of_it_alone() -> None:
    sides = [SmallSide("ours", 8), SmallSide("small", 1), SmallSide("other", 8, shift=1)]
    scenarios = [engine.SpeedScenario(1, 4, 3), engine.SpeedScenario(2, 4, 3)]
    told: list[tuple[str, str]] = []
    found = engine.measure(sides, scenarios, 600, 2, lambda scenario, side, error: told.append((scenario, side)))
    assert told == [("decode, batch 2", "small")], "and it isn't asked again"
    assert {name: set(by_side) for name, by_side in found.items()} == {
        "decode, batch 1": {"ours", "small", "other"}, "decode, batch 2": {"ours", "other"},
    }  # fmt: skip
    assert [len(one.rates) for one in found["decode, batch 2"].values()] == [2, 2]
    assert (found["decode, batch 1"]["small"].equal, found["decode, batch 2"]["other"].equal) == (
        [True] * 2,
        [False] * 4,
    )
    with pytest.raises(torch.OutOfMemoryError):
        engine.measure(sides, scenarios, 600, 1)
