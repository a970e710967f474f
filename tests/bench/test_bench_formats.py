"""Formats of weights beside rivals: figures of all that is there, and in words what isn't, what died, and of what."""

from __future__ import annotations

import json
import os
from pathlib import Path

import gguf
import pytest

from bench.common import random_model
from bench.engine import formats
from bench.engine.engine_speed import Measured
from bench.rivals import rival_engine
from bench.rivals.rival_engine import Rival, RivalDied

TINY = {"hidden": 256, "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 64, "inner": 256, "vocab": 2304}
ANSWER = '{"tokens": [[7, 8]], "times_s": [[0.5, 0.75]]}'


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where rivals are installed: none is."""
    monkeypatch.setattr(rival_engine, "ENVIRONMENTS", tmp_path / "rivals")
    return tmp_path / "rivals"


def install(environments: Path, name: str, script: str) -> None:
    """A stand-in for a rival: a shell script in the place of its Python."""
    program = environments / name / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@pytest.mark.slow
def test_every_format_is_measured_and_a_rival_that_is_not_installed_is_named(
    environments: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(random_model.SIZES, "tiny", TINY)
    monkeypatch.setattr(formats, "MADE", tmp_path / "models")
    out, before = tmp_path / "out.json", os.sched_getaffinity(0)
    sizes = ["--prefill-tokens", "24", "--context", "9", "--output-tokens", "3", "--batches", "2", "--repeats", "2"]
    chosen = ["--make", "tiny", "--formats", "bf16", "q8_0", "q4_k", "--rivals"]
    assert formats.main([*sizes, *chosen, "--json", str(out)]) == 0
    assert os.sched_getaffinity(0) == before

    written = json.loads(out.read_text())
    rows = [f"{kind}, {scenario}" for kind in chosen[3:6] for scenario in ("prefill of 24", "decode, batch 2")]
    assert list(written["tokens_per_s"]) == rows
    for row, by_side in written["tokens_per_s"].items():
        assert [*by_side] == ["invariant", *(["int8"] if "bf16" not in row else []), "fast", "generate"]
        assert all(len(side["rates"]) == 2 and min(side["rates"]) > 0 for side in by_side.values())
    for rival in ("openvino", "llamacpp"):
        absent = f"without {rival}: {rival} is not installed; run: python -m bench.rivals --install {rival}"
        assert [note for note in written["notes"] if rival in note] == [f"{kind}: {absent}" for kind in chosen[3:6]]
    said = capsys.readouterr().out
    assert "| tokens/s | invariant | int8 | fast | openvino | llamacpp | generate |" in said
    assert written["machine"]["processor"] in said

    made = {path.name for path in (tmp_path / "models").iterdir()}
    assert made == {"tiny", "tiny-BF16.gguf", "tiny-Q8_0.gguf", "tiny-Q4_K.gguf"}, "and nothing half-made"
    tokens = gguf.GGUFReader(tmp_path / "models" / "tiny-Q8_0.gguf").fields["tokenizer.ggml.tokens"]
    assert len(tokens.data) == TINY["vocab"], "llama.cpp wants a token for each row of the embedding"


def test_a_rival_killed_by_its_instructions_goes_on_with_fewer_and_says_so(environments: Path, tmp_path: Path) -> None:
    dies = "echo 'products in tiles' >&2; kill -FPE $$"
    fewer = f"""test "$ONEDNN_MAX_CPU_ISA" = AVX512_CORE_BF16 && {{ read line; echo '{ANSWER}'; read line; }}"""
    for when, script in {"starts": "{dies}", "asked": "read line; {dies}"}.items():
        begin = """echo '{"about": "Rival 1"}'\n"""
        first = script.format(dies=dies)
        install(environments / when, "openvino", f"{fewer.replace('{ read', '{ ' + begin + 'read')}\n{begin}{first}")
    for when in ("starts", "asked"):
        (environments / "openvino").unlink(missing_ok=True)
        (environments / "openvino").symlink_to(environments / when / "openvino")
        rival = Rival("openvino", tmp_path / "model.gguf", 1)
        try:
            assert rival.name == "Rival 1"
            assert rival.run([[1, 2]], 2).tokens == [[7, 8]], when
            how = "openvino died by SIGFPE: products in tiles; since then with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
            assert rival.notes == [how]
        finally:
            rival.close()


def test_a_rival_that_dies_says_its_signal_and_its_last_words(environments: Path, tmp_path: Path) -> None:
    install(environments, "llamacpp", "echo '{\"about\": \"Rival\"}'; read line; echo 'no such tile' >&2; kill -ILL $$")
    rival = Rival("llamacpp", tmp_path / "model.gguf", 1)
    try:
        for _ in range(2):
            with pytest.raises(RivalDied, match="llamacpp died by SIGILL: no such tile"):
                rival.run([[1, 2]], 2)
    finally:
        rival.close()
    install(environments, "vllm", "echo 'no memory' >&2; exit 3")
    with pytest.raises(RivalDied, match="vllm ended with exit code 3: no memory"):
        Rival("vllm", tmp_path, 1)


def test_a_figure_has_its_spread_and_the_first_column_over_it() -> None:
    by_side = {"ours": Measured([90.0, 100.0, 120.0]), "other": Measured([50.0, 50.0])}
    head, _, row = formats.table({"q4_0": {"prefill of 512": by_side}}, ("ours", "dead", "other"))
    assert head == "| tokens/s | ours | dead | other |"
    assert row == "| q4_0, prefill of 512 | 100.0 ±15% | – | 50.0 ±0% (2.00) |"
