"""Quantised checkpoints through both workers: the tokens are those of transformers for the dequantised weights, in any
layout and family, after hand-overs and from found prefixes."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import Oracle, compare
from tests.support.family_scenes import CHUNK, PAGE, Family, ask, device_bytes, expect_answers, greedy, tokens_of
from tests.support.gguf_files import GgufOracle, write_gguf
from tests.support.model_families import FAMILIES
from tests.support.quantised_checkpoints import quantise_folder, quantised_names
from tests.support.rank_followers import RankProcesses
from tests.support.retract_scenes import mixed, pages_of, run
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
        assert isinstance(both.decode.setup.engine.decoder.embed_vh, RowExactLinear), "nothing was expanded"
        answers = ask(both, prompts, 8)
    oracle = GgufOracle(file)
    for prompt, answer in zip(prompts, answers, strict=True):
        verdict = compare(oracle, prompt, answer.list)
        assert verdict.equal, verdict


def written(name: str, layout: str, base: Path) -> Quantised:
    return Quantised(name, quantise_folder(FAMILIES[name](base / name), layout, base / "written").stored)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout", "plane", "prefill", "decode"), [
    ("llama", "gptq-8", "shm", 2, 1), ("qwen3_moe", "packed-int4", "zmq", 1, 2), ("qwen3_next", "int8", "shm", 1, 2),
    ("deepseek_v3", "fp8-blocks", "zmq", 2, 1),
])  # fmt: skip
def test_ranks_on_one_side_answer_as_the_dequantised_model(
    tmp_path: Path, warm: RankProcesses, name: str, layout: str, plane: str, prefill: int, decode: int
) -> None:
    family = written(name, layout, tmp_path)
    sections: dict[str, Any] = {"transfer": {"plane": plane}, "cache": {"page_tokens": PAGE}}
    with pair(
        family.folder, tokens=4096, ranks=warm, prefill={"chunk_tokens": 48, "tp": prefill}, decode={"tp": decode},
        **sections,
    ) as both:  # fmt: skip
        prompts = [tokens_of(seed, length) for seed, length in enumerate((5, 33, 90))]
        for prompt, answer in zip(prompts, ask(both, prompts, 6), strict=True):
            family.expect(prompt, answer.list)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), [
    ("llama", "nvfp4-modelopt"), ("qwen3_moe", "fp8-channel"), ("deepseek_v32", "fp8-tensor"),
    ("falcon_h1", "packed-int8-channel"),
])  # fmt: skip
def test_requests_that_are_retracted_and_resumed_answer_as_the_dequantised_model(
    tmp_path: Path, name: str, layout: str
) -> None:
    family = written(name, layout, tmp_path)
    asks = mixed(8, longest=40, answer=12)
    need = sum(pages_of(asks))
    tier = {"host_bytes": 3 * device_bytes(family, need * PAGE, page_tokens=PAGE), "device_requests": 2}
    decode = {"retract": "copy", "cache": tier}
    tokens = max(max(pages_of(asks)) + 1, need // 4) * PAGE
    done = run(family, asks, tokens, 8, decode, faults={"retract_every": 5})
    assert done.counters["retractions"] == done.counters["resumptions"] > 0
    for (prompt, _), answer in zip(asks, done.answers, strict=True):
        family.expect(prompt, answer)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), [("llama", "gptq-v2"), ("qwen3_5", "packed-int4")])
def test_what_a_dead_decode_worker_had_begun_another_ends_as_the_dequantised_model(
    tmp_path: Path, name: str, layout: str
) -> None:
    """A router gives another pair the prompt and the tokens that the client has."""
    family = written(name, layout, tmp_path)
    prompt, sampling = tokens_of(3, 40), greedy(10)
    with pair(family.folder, tokens=2048, cache={"page_tokens": PAGE}) as both:
        begun = both.submit(prompt, sampling)
        while len(both.answers[begun].tokens) < 4:
            both.step()
        given = both.answers[begun].list
    with pair(family.folder, tokens=2048, cache={"page_tokens": PAGE}) as others:
        (rest,) = others.run(others.submit(prompt, sampling, emitted=given))
        assert rest.done is not None
        assert rest.done.error is None
    family.expect(prompt, [*given, *rest.list])
    assert len(given) + len(rest.list) == 10
