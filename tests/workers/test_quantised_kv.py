"""Both workers over quantised keys, values and latents: the tokens are those of the definition (a transformers model
whose cache is rounded by it), over hand-overs, tiers, retractions and unequal ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.family_scenes import (
    PAGE,
    ask,
    bytes_due,
    expect_answers,
    expect_damage_is_caught,
    expect_tiers,
    expect_unnoticed_damage_shows,
    tokens_of,
)
from tests.support.model_families import FAMILIES
from tests.support.quantised_cache import QuantisedFamily
from tests.support.rank_followers import RankProcesses
from tests.support.retract_scenes import expect_each_buffer_is_swapped_and_read, expect_same_answers
from tests.support.worker_pair import pair
from tests.support.worker_parts import manager_of
from twinpool.contracts.ids import Role

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], QuantisedFamily]:
    base = tmp_path_factory.mktemp("families")

    @cache
    def make(name: str, kv_dtype: str) -> QuantisedFamily:
        folder = base / name
        return QuantisedFamily(name, folder if folder.exists() else FAMILIES[name](folder), {"kv_dtype": kv_dtype})

    return make


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("name", "kv_dtype", "plane"),
    [
        ("llama", "fp8", "shm"), ("llama", "int8", "zmq"), ("gemma3", "fp8", "zmq"), ("deepseek_v3", "int8", "shm"),
        ("deepseek_v3", "fp8", "zmq"), ("deepseek_v32", "fp8", "shm"), ("gpt_oss", "int8", "shm"),
        ("qwen3_next", "fp8", "shm"),
    ],
)  # fmt: skip
def test_answers_are_the_definitions_and_hand_overs_are_what_is_due(
    family: Callable[[str, str], QuantisedFamily], name: str, kv_dtype: str, plane: str
) -> None:
    expect_answers(family(name, kv_dtype), plane, (1, 17, 65, 130), 8)


@pytest.mark.parametrize(("name", "kv_dtype"), [("llama", "int8"), ("gemma3", "fp8")])
def test_codes_and_scales_go_through_host_and_storage_and_come_back(
    family: Callable[[str, str], QuantisedFamily], name: str, kv_dtype: str
) -> None:
    expect_tiers(family(name, kv_dtype), talks=5, turns=2)


def test_retracted_requests_come_back_with_codes_and_scales(family: Callable[[str, str], QuantisedFamily]) -> None:
    quantised = family("llama", "fp8")
    expect_same_answers(quantised, 20, at_once=20, longest=32, answer=16)
    expect_each_buffer_is_swapped_and_read(quantised)


@pytest.mark.parametrize(("name", "kv_dtype"), [("llama", "fp8"), ("deepseek_v3", "int8")])
def test_damage_to_codes_or_scales_is_caught_and_would_show(
    family: Callable[[str, str], QuantisedFamily], name: str, kv_dtype: str
) -> None:
    quantised = family(name, kv_dtype)
    expect_damage_is_caught(quantised)
    expect_unnoticed_damage_shows(quantised)


@pytest.mark.parametrize(("plane", "prefill", "decode"), [("shm", 2, 1), ("zmq", 1, 2)])
def test_ranks_hand_over_the_scales_of_their_heads(
    family: Callable[[str, str], QuantisedFamily], warm: RankProcesses, plane: str, prefill: int, decode: int
) -> None:
    quantised = family("llama", "fp8")
    asked = [tokens_of(seed, length) for seed, length in enumerate((17, 97, 130))]
    sections: dict[str, Any] = {"transfer": {"plane": plane}, "cache": {"page_tokens": PAGE, **quantised.cache}}
    with pair(
        quantised.folder, tokens=2048, ranks=warm, prefill={"chunk_tokens": 50, "tp": prefill},
        decode={"tp": decode}, **sections,
    ) as both:  # fmt: skip
        answers = ask(both, asked, 8)
        pools = manager_of(both.decode).spec.whole
    for prompt, answer in zip(asked, answers, strict=True):
        quantised.expect(prompt, answer.list)
        assert answer.progress[Role.DECODE].transfer_bytes == bytes_due(pools, len(prompt))


def test_storage_of_another_kv_dtype_is_not_read(family: Callable[[str, str], QuantisedFamily], tmp_path: Path) -> None:
    """One folder for all: what was computed with other codes has other names."""
    quantised, prompt = family("llama", "fp8"), tokens_of(5, 100)
    storage = {"backend": "file", "path": str(tmp_path)}
    tiers = {"page_tokens": PAGE, "host_bytes": 1 << 20, "storage": storage, "prefetch": {"policy": "wait_complete"}}
    for kv_dtype, found in (("fp8", 0), ("int8", 0), ("auto", 0), ("fp8", 96)):
        with pair(quantised.folder, tokens=512, cache={**tiers, "kv_dtype": kv_dtype}) as both:
            (answer,) = ask(both, [prompt], 4)
            assert answer.progress[Role.PREFILL].cached_by_tier.get("storage", 0) == found, kv_dtype
            both.settle()
            while manager_of(both.prefill).busy:
                both.step()
    quantised.expect(prompt, answer.list)
