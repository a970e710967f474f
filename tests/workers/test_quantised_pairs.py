"""Quantised checkpoints through both workers: the tokens are those of transformers for the dequantised weights, in any
layout and family, after hand-overs and from found prefixes."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import pytest

from tests.support.checkpoints import Oracle
from tests.support.family_scenes import Family, expect_answers
from tests.support.model_families import FAMILIES
from tests.support.quantised_checkpoints import quantise_folder, quantised_names

CELLS = (
    ("llama", "awq", "shm"),
    ("qwen3", "gptq-ordered", "zmq"),
    ("qwen3_moe", "fp8-blocks", "shm"),
    ("deepseek_v32", "fp8-ue8m0", "zmq"),
    ("qwen3_next", "packed-int4-zeros", "shm"),
    ("gemma3", "nvfp4", "local"),
)


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
