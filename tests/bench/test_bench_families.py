"""The miniatures of the families are what they are said to be, and all of them are measured and answer alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.common import random_model
from bench.engine import engine_speed as engine

LAYERS = {"window": 6, "hybrid-delta": 4}
"""The fewest that have layers of both kinds; 2 for the others."""


@pytest.mark.slow
@pytest.mark.parametrize("family", random_model.FAMILIES)
def test_a_miniature_has_some_twenty_to_sixty_million_parameters(family: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(random_model.config_of(family))
    assert 20e6 < sum(p.numel() for p in model.parameters()) < 65e6


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [["window", "hybrid-delta"], pytest.param(list(random_model.FAMILIES), marks=pytest.mark.soak)], ids=len
)
def test_families_are_measured_and_answer_as_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    small = {
        name: (kind, numbers | {"num_hidden_layers": LAYERS.get(name, 2)})
        for name, (kind, numbers) in random_model.FAMILIES.items()
    }
    monkeypatch.setattr(random_model, "FAMILIES", small)
    out = tmp_path / "out.json"
    sizes = ["--prefill-tokens", "150", "--context", "140", "--output-tokens", "4", "--batches", "2"]
    sizes += ["--sides", "invariant", "drafted", "generate"]
    arguments = [*sizes, "--dtype", "float32", "--repeats", "1", "--threads", "1", "--json", str(out)]
    assert engine.main(["--families", *names, *arguments]) == 0
    written = json.loads(out.read_text())
    scenarios = ("prefill of 150", "decode, batch 2")
    assert list(written["tokens_per_s"]) == [f"{name}: {scenario}" for name in names for scenario in scenarios]
    assert all(side["median"] > 0 for by_side in written["tokens_per_s"].values() for side in by_side.values())
    assert set(written["same_tokens"].values()) == {1.0}
