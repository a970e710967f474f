"""Workers whose ranks are stages of layers: the same answers, whatever the layouts on both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import Oracle
from tests.support.layout_scenes import check_answers, check_retracted, check_stored
from tests.support.model_families import EVERY
from tests.support.rank_followers import RankProcesses
from tests.support.stepped_cluster import company, generated
from tests.support.worker_pair import pair
from tests.workers.test_migrations import prompts as running_prompts
from tests.workers.test_migrations import seeded
from tests.workers.test_pair import expect_equal, greedy, prompts
from twinpool.contracts.ids import Role

PP1, PP2, TP2 = {}, {"pp": 2}, {"tp": 2}  # type: ignore[var-annotated]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plane", "prefill", "decode"),
    [
        ("shm", PP2, PP1), ("shm", PP1, PP2), ("shm", PP2, PP2), ("shm", PP2, TP2), ("shm", TP2, PP2),
        ("zmq", PP2, PP1), ("zmq", PP1, PP2), ("zmq", PP2, TP2), ("nixl", PP2, PP1), ("nixl", TP2, PP2),
        ("staged", PP2, PP1), ("staged", TP2, PP2),
    ],
)  # fmt: skip
def test_greedy_answers_are_the_oracles_with_stages_on_one_side_and_on_both(
    model: Path, oracle: Oracle, warm: RankProcesses, plane: str, prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    with pair(
        model,
        tokens=2048,
        ranks=warm,
        transfer={"plane": plane},
        cache={"page_tokens": 16},
        prefill={"chunk_tokens": 96, **prefill},
        decode=decode,
    ) as both:
        asked = prompts(1, 1, 16, 17, 97, 200)
        answers = both.run(*[both.submit(p, greedy(8)) for p in asked])
        for prompt, answer in zip(asked, answers, strict=True):
            expect_equal(oracle, prompt, answer)
            received = answer.progress[Role.DECODE].transfer_bytes
            assert received == -(-len(prompt) // 16) * 512 * 16


FAMILIES: dict[str, Any] = {
    "llama": {},
    "qwen3_moe": {},
    "deepseek_v32": {},
    "gpt_oss": {},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"]},
    "falcon_h1": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
def test_every_kind_of_state_is_handed_over_between_stages_and_one_rank(
    tmp_path: Path, warm: RankProcesses, family: str, prefill: int, decode: int
) -> None:
    folder = EVERY[family](tmp_path / "model", **FAMILIES[family])
    check_answers(folder, warm, {"pp": prefill}, {"pp": decode})


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3])
def test_every_stages_layers_of_a_retracted_request_come_back(tmp_path: Path, warm: RankProcesses, stages: int) -> None:
    """Stages have two layers and three, or one, two and two; all have as many host pages."""
    model = EVERY["llama"](tmp_path / "model", layers=5)
    check_retracted(model, Oracle(model), warm, {"pp": stages})


@pytest.mark.slow
def test_what_stages_have_stored_others_read_and_the_other_way_round(
    model: Path, oracle: Oracle, warm: RankProcesses, tmp_path: Path
) -> None:
    layouts = ((PP2, 0), (PP1, 192), (PP2, 192), (TP2, 192))
    check_stored(model, oracle, warm, tmp_path / "pages", layouts)


@pytest.mark.slow
def test_a_drained_worker_of_stages_hands_its_running_requests_on_with_all_layers(
    model: Path, warm: RankProcesses
) -> None:
    with company(model) as c:
        for number, prompt in enumerate(running_prompts(1, 8)):
            c.submit(prompt, seeded(number))
        undisturbed = c.run()
    with company(model, ranks=warm, transfer={"plane": "shm"}, decode={"pp": 2}) as c:
        rids = [c.submit(prompt, seeded(number)) for number, prompt in enumerate(running_prompts(1, 8))]
        c.until(lambda: all(generated(c, rid, 6)() for rid in rids), "all to run", 1_000_000)
        c.drain("decode-0")
        c.until(lambda: c.decode("decode-0").drained, "decode-0 to be empty", 1_000_000)
        assert c.run(*rids) == undisturbed
        assert c.core.migrations.counts.migrated == 4
        assert [c.told[rid].replays for rid in rids] == [[]] * 8, "nothing was computed again"
