"""Quantised checkpoints through both workers: the tokens are those of transformers for the dequantised weights, in any
layout and family, after hand-overs and from found prefixes."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import Oracle, compare
from tests.support.family_scenes import CHUNK, Family, ask, expect_answers, tokens_of
from tests.support.gguf_files import GgufOracle, write_gguf
from tests.support.model_families import FAMILIES
from tests.support.quantised_checkpoints import quantise_folder, quantised_names
from tests.support.worker_pair import pair
from twinpool.engine.tensors.row_exact_linear import RowExactLinear

CELLS = (
    ("llama", "awq", "shm"),
    ("qwen3", "gptq-ordered", "zmq"),
    ("qwen3_moe", "fp8-blocks", "shm"),
    ("deepseek_v32", "fp8-ue8m0", "zmq"),
    ("qwen3_next", "packed-int4-zeros", "shm"),
    ("gemma3", "nvfp4", "local"),
)


GGUF = (("Q4_1", "shm"), ("Q8_0", "zmq"), ("Q5_1", "local"))


class Quantised(Family):
    @cached_property
    def oracle(self) -> Oracle:
        return Oracle(self.folder.parent / "plain")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout", "plane"), CELLS)
def test_both_workers_answer_as_the_dequantised_model(tmp_path: Path, name: str, layout: str, plane: str) -> None:
    folder = FAMILIES[name](tmp_path / name, published=name != "gemma3")  # Published, that has a vision tower.
    written = quantise_folder(folder, layout, tmp_path / "written")
    assert len(list(quantised_names(written.stored))) > 8
    expect_answers(Quantised(name, written.stored), plane, (1, 17, 65, 130), 8)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "plane"), GGUF)
def test_both_workers_answer_from_a_file_kept_as_it_is_stored(tmp_path: Path, kind: str, plane: str) -> None:
    """As transformers answers, which expands the file; its quantised embedding is the head, too."""
    folder = FAMILIES["llama"](tmp_path / "llama", tied=True)
    file = write_gguf(folder, tmp_path / "model.gguf", "llama", kind)
    prompts = [tokens_of(seed, length) for seed, length in enumerate((1, 17, 65, 130))]
    sections: dict[str, Any] = {
        "transfer": {"plane": plane},
        "prefill": {"chunk_tokens": CHUNK},
        "engine": {"dtype": "float32"},
    }
    with pair(file, tokens=16384, **sections) as both:
        assert isinstance(both.decode._engine.decoder.embed_vh, RowExactLinear), "nothing was expanded"
        answers = ask(both, prompts, 8)
    oracle = GgufOracle(file)
    for prompt, answer in zip(prompts, answers, strict=True):
        verdict = compare(oracle, prompt, answer.list)
        assert verdict.equal, verdict
