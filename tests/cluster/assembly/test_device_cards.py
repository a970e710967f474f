"""Cards dealt out, and what ranks get of them: by readings of GPUs that aren't here."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.support.model_families import FAMILIES
from twinpool.cache.device.device_choice import GpuView
from twinpool.cache.memory.kv_cache_spec import PoolKind
from twinpool.cluster.assembly.memory_plan import (
    LargestStage,
    MemoryPlan,
    PoolPlan,
    largest_stage,
    state_options,
)
from twinpool.cluster.assembly.node_shares import (
    PROCESS_BYTES,
    CardFacts,
    CardParts,
    MemoryShort,
    NodeFacts,
    _measure,
    cards_of,
    deal,
    measured,
    min_part,
    read_cards,
)
from twinpool.cluster.ray_nodes.worker_actor import rank_resources
from twinpool.cluster.serve.memory_fit import CUDA_WORKER_BYTES
from twinpool.cluster.serve.preflight import ServeOptions, ServePlan, on_device, prepare
from twinpool.cluster.serve.terminal import node_table, pool_table
from twinpool.cluster.worker_process.worker_plan import WorkerPlan
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.engine.models.registry import read_model

GIB = 1 << 30
SEEN = GpuView(2, "", True)


def cards(*free: int) -> tuple[CardFacts, ...]:
    every = range(len(free))
    return tuple(
        CardFacts(index, "a card", 80 * GIB, free[index], 90, tuple(other for other in every if other != index))
        for index in every
    )


def planned(*free: int, assignments: Sequence[str] = (), host: int = 64 * GIB, **counts: int) -> ServePlan:
    """`serve`'s plan on a machine with cards that have so many free bytes."""
    options = replace(ServeOptions(port=0), assignments=tuple(assignments), **counts)  # type: ignore[arg-type]
    return prepare(options, host, cards(*free))


def test_cards_are_dealt_in_turn_rank_by_rank() -> None:
    names = [WorkerName(n) for n in ("prefill-0", "decode-0", "decode-1")]
    assert deal([(name, 1) for name in names], cards(1, 1)) == {names[0]: (0,), names[1]: (1,), names[2]: (0,)}
    assert deal([(names[0], 2), (names[1], 1)], cards(1, 1, 1)) == {names[0]: (0, 1), names[1]: (2,)}
    assert deal([(names[0], 1), (names[1], 2)], cards(1, 1)) == {names[0]: (0,), names[1]: (1, 0)}
    with pytest.raises(ConfigError, match=r"the 3 ranks of prefill-0 need a GPU each; engine\.device names 2"):
        deal([(names[0], 3)], cards(1, 1))


def test_ranks_that_share_a_card_have_equal_parts_and_all_have_the_least() -> None:
    a, b, c = (WorkerName(n) for n in ("prefill-0", "decode-0", "decode-1"))
    assert min_part({a: (0,), b: (0,)}, cards(40 * GIB)) == 20 * GIB
    assert min_part({a: (0,), b: (1,), c: (0,)}, cards(40 * GIB, 40 * GIB)) == 20 * GIB
    assert min_part({a: (0,), b: (1,)}, cards(40 * GIB, 10 * GIB)) == 10 * GIB


def test_pools_take_their_share_of_what_is_free_on_a_card_after_weights_process_and_steps() -> None:
    for share in (0.9, 0.5):
        found = planned(3 * GIB, 3 * GIB, assignments=[f"cache.device_share={share}"])
        for role, plan in found.here.plans.items():
            want = int(share * (3 * GIB - PROCESS_BYTES - found.weights - found.here.steps[role].nbytes))
            assert found.here.device_bytes[role] == want
            assert plan.nbytes <= want
    # A card that is too small for a context for each request is filled.
    free = PROCESS_BYTES + max(steps.nbytes for steps in found.here.steps.values()) + (40 << 20)
    small = planned(free, free)
    budget = small.here.device_bytes[Role.DECODE]
    page = small.here.plans[Role.DECODE].nbytes / small.here.plans[Role.DECODE].counts["full"]
    assert budget - 2 * page < small.here.plans[Role.DECODE].nbytes <= budget


def test_a_rank_has_its_part_of_weights_and_pools_and_a_stage_that_of_the_largest() -> None:
    """Prefill has two ranks with half of everything each; decode three stages, of which one has most of the weights and
    one most of the pools."""
    roles = (Role.PREFILL, Role.DECODE)
    parts = CardParts(
        10 * GIB, {Role.PREFILL: 2, Role.DECODE: 3}, dict.fromkeys(roles, 0.5), 4 * GIB, dict.fromkeys(roles, GIB),
        {Role.DECODE: LargestStage(0.75, 0.625)},
    )  # fmt: skip
    left = {role: 10 * GIB - PROCESS_BYTES - GIB - weights * GIB for role, weights in zip(roles, (2, 3), strict=True)}
    fits = {Role.PREFILL: left[Role.PREFILL] * 2, Role.DECODE: left[Role.DECODE] * 8 // 5}
    assert {role: parts.budget(role) for role in roles} == {role: nbytes // 2 for role, nbytes in fits.items()}

    def plan(nbytes: int) -> MemoryPlan:
        return MemoryPlan((PoolPlan("full", PoolKind.FULL, 1, nbytes, ""),), 1, 16)

    assert parts.short({role: plan(nbytes) for role, nbytes in fits.items()}) == ""
    for role, weights, pools in ((Role.PREFILL, "2,048", "6,656"), (Role.DECODE, "3,072", "5,760")):
        said = parts.short({role: plan(fits[role] + GIB)})
        assert f"a {role} worker needs about" in said
        assert f"({weights} MiB of weights, pools of {pools} MiB, 1,024 MiB for steps)" in said


def test_stages_of_one_role_are_planned_by_their_largest_and_the_other_role_as_before() -> None:
    """Two stages of the demo have half of its pools each, and the larger one two thirds of its weights."""
    assignments = ["decode.pp=2", "prefill.cache.device_share=0.5", "decode.cache.device_share=0.5"]
    found = planned(4 * GIB, 4 * GIB, 4 * GIB, assignments=assignments)
    model = read_model(Path(found.spec.path))
    pool_set = model.pool_set(state_options(model.spec, found.config, Role.DECODE))
    largest = largest_stage(found.spec, pool_set, found.config.engine, 2)
    assert (round(largest.weights, 2), largest.pools) == (0.66, 0.5)
    assert found.here.dealt == {"prefill-0": (0,), "decode-0": (1, 2)}
    for role, weights, ranks in (
        (Role.PREFILL, found.weights, 1),
        (Role.DECODE, int(largest.weights * found.weights), 2),
    ):
        left = 4 * GIB - PROCESS_BYTES - found.here.steps[role].nbytes - weights
        assert found.here.device_bytes[role] == left // 2 * ranks


def test_a_share_can_be_set_by_role() -> None:
    found = planned(4 * GIB, 4 * GIB, assignments=["decode.cache.device_share=0.25"])
    assert found.here.device_bytes[Role.DECODE] * 3 < found.here.device_bytes[Role.PREFILL]


def test_two_roles_on_one_card_share_its_memory() -> None:
    two, one = planned(6 * GIB, 6 * GIB), planned(12 * GIB)
    assert one.here.dealt == {"prefill-0": (0,), "decode-0": (0,)}
    assert two.here.dealt == {"prefill-0": (0,), "decode-0": (1,)}
    assert one.here.device_bytes == two.here.device_bytes


def test_host_memory_has_neither_weights_nor_pools_but_processes_and_host_tiers() -> None:
    found = planned(60 * GIB, 60 * GIB, host=8 * GIB, assignments=["cluster.host_memory_bytes=8000000000"])
    assert found.here.host_budget == min(8_000_000_000, 8 * GIB - 2 * CUDA_WORKER_BYTES)
    with pytest.raises(MemoryShort, match="3,072 MiB are free"):
        planned(60 * GIB, 60 * GIB, host=3 * GIB)


@pytest.mark.parametrize("tokens", [0, 10**9])
def test_what_a_card_has_no_room_for_is_refused_with_a_size_that_fits(tokens: int) -> None:
    if not tokens:
        with pytest.raises(MemoryShort, match=r"each rank has 1,024 MiB of a GPU, too little.*or engine\.device=cpu$"):
            planned(GIB, GIB)
        return
    with pytest.raises(
        MemoryShort, match=r"each rank of a prefill worker needs .* of a GPU .* has 8,192 MiB"
    ) as caught:
        planned(8 * GIB, 8 * GIB, assignments=[f"cache.device_tokens={tokens}"])
    fits = str(caught.value).rpartition("cache.device_tokens=")[2].partition(" ")[0]
    assert planned(8 * GIB, 8 * GIB, assignments=[f"cache.device_tokens={fits}"]).here.plans


def test_a_worker_is_told_its_cards_and_each_rank_its_own() -> None:
    found = planned(8 * GIB, 8 * GIB, 8 * GIB, assignments=["decode.tp=2"])
    name = WorkerName("decode-0")
    assert found.cards_of(name, Role.DECODE) == (1, 2)
    # Its role is changed: it stays where it is.
    assert found.cards_of(name, Role.PREFILL) == (1,)
    assert found.cards_of(WorkerName("prefill-0"), Role.DECODE) == (0, 1)
    plan = worker_plan(found, name, (1, 2))
    assert [replace(plan, rank=rank).rank_config.engine.device for rank in (0, 1)] == ["cuda:1", "cuda:2"]
    assert rank_resources(plan) == {"twinpool_decode": 1.0}


def test_under_a_ray_that_is_joined_each_rank_asks_for_a_gpu_of_its_own() -> None:
    options = replace(ServeOptions(port=0), ray_address="auto")
    joined = prepare(options)
    assert joined.config.engine.device == "auto", "its nodes decide"
    joined = replace(joined, config=on_device(joined.config, True))
    node = NodeFacts("n", 8, 64 * GIB, {Role.PREFILL: 1, Role.DECODE: 1}, "n-id", cards(9 * GIB, 8 * GIB))
    share = joined.divide(node)
    assert share.device_bytes[Role.DECODE] == int(
        0.9 * (8 * GIB - PROCESS_BYTES - joined.weights - share.steps[Role.DECODE].nbytes)
    )
    assert joined.cards_of(WorkerName("decode-0"), Role.DECODE) == ()
    plan = worker_plan(joined, WorkerName("decode-0"), ())
    assert plan.rank_config.engine.device == "cuda"
    assert rank_resources(plan) == {"twinpool_decode": 1.0, "GPU": 1.0}
    with pytest.raises(MemoryShort, match="no GPU that torch sees"):
        joined.divide(replace(node, cards=()))
    on_cpu = replace(joined, config=on_device(prepare(options).config, False))
    assert rank_resources(worker_plan(on_cpu, WorkerName("decode-0"), ())) == {"twinpool_decode": 1.0}


def worker_plan(found: ServePlan, name: WorkerName, dealt: tuple[int, ...]) -> WorkerPlan:
    return WorkerPlan(
        name, Role.DECODE, Incarnation(1), found.spec.path, found.config, {}, "", "", found.spec.path, cards=dealt
    )


def test_the_setting_says_which_cards_count() -> None:
    both = cards(GIB, 2 * GIB)
    for setting, want in (("auto", both), ("cuda", both), ("cuda:1", both[1:]), ("cpu", ())):
        assert cards_of(setting, SEEN, lambda: both) == want
    for blind in (GpuView(0, "no driver", True), GpuView(2, "", False)):
        assert cards_of("auto", blind, lambda: both) == ()


@pytest.mark.parametrize(
    ("setting", "view", "words"),
    [
        (
            "cuda",
            GpuView(0, "no driver", True),
            "engine.device=cuda: torch sees no GPU: no driver; use engine.device=cpu",
        ),
        ("cuda", GpuView(1, "", False), r"triton isn't installed: pip install 'twinpool\[cuda\]'"),
        ("cuda:2", SEEN, "engine.device=cuda:2: torch sees cuda:0 to cuda:1"),
        ("cuda:1", GpuView(1, "", True), "engine.device=cuda:1: torch sees cuda:0 alone"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused_with_the_reason(setting: str, view: GpuView, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cards_of(setting, view, lambda: cards(GIB))


def test_serves_tables_show_both_memories() -> None:
    found = planned(6 * GIB, 5 * GIB)
    out = io.StringIO()
    for table in (node_table(found), pool_table(found, found.here)):
        Console(file=out, width=160).print(table)
    text = out.getvalue()
    for words in ("cards", "free there", "11,264.0 MiB", "65,536.0 MiB", "on its card"):
        assert words in text


def test_serve_takes_a_plane_that_all_cards_reach_each_other_by() -> None:
    assert planned(GIB * 8, GIB * 8).config.transfer.plane == "cuda_ipc"
    one, other = cards(GIB * 8, GIB * 8)
    lonely = (one, replace(other, peers=()))
    assert prepare(ServeOptions(port=0), 64 * GIB, lonely).config.transfer.plane == "staged"
    asked = replace(ServeOptions(port=0), assignments=("transfer.plane=cuda_ipc",))
    with pytest.raises(ConfigError, match=r"cuda:1 \(a card\) doesn't reach the memory of cuda:0; use .*staged"):
        prepare(asked, 64 * GIB, lonely)


def test_in_one_process_all_workers_are_on_one_card() -> None:
    found = planned(8 * GIB, 8 * GIB, assignments=["transfer.plane=local"])
    assert found.here.dealt == {"prefill-0": (0,), "decode-0": (0,)}


def test_where_only_some_nodes_have_gpus_workers_and_their_memory_are_on_cpus() -> None:
    joined = prepare(replace(ServeOptions(port=0), ray_address="auto"))
    joined = replace(joined, config=on_device(joined.config, False))
    node = NodeFacts("n", 8, 16 * GIB, {Role.PREFILL: 1, Role.DECODE: 1}, "n-id")
    with_gpus = replace(node, cards=cards(70 * GIB))
    assert joined.divide(with_gpus) == joined.divide(node)


def test_a_node_without_the_gpus_that_are_asked_for_takes_no_worker_and_says_why() -> None:
    joined = prepare(replace(ServeOptions(port=0), ray_address="auto", assignments=("engine.device=cuda",)))
    facts = replace(measured({Role.PREFILL: 1, Role.DECODE: 1}, "n-id", "cuda"), cards=())
    with pytest.raises(MemoryShort, match=r"engine\.device=cuda: torch sees no GPU"):
        joined.divide(facts)


def test_float8_index_keys_are_refused_on_a_card_that_lacks_float8(tmp_path: Path) -> None:
    folder = FAMILIES["deepseek_v32"](tmp_path / "model")
    options = replace(ServeOptions(port=0), model=str(folder), assignments=("cache.index_dtype=fp8",))
    old = tuple(replace(card, capability=86) for card in cards(8 * GIB))
    with pytest.raises(MemoryShort, match=r"cuda:0 \(a card\): buffer index_k is float8.* 8\.9.* 8\.6; use cache"):
        prepare(options, 64 * GIB, old)
    assert prepare(options, 64 * GIB, cards(8 * GIB)).here.plans
    for others in ((), (*options.assignments, "engine.attention=torch")):
        assert prepare(replace(options, assignments=others), 64 * GIB, old).here.plans


def test_a_quantised_kv_cache_is_refused_on_any_card(tmp_path: Path) -> None:
    options = ServeOptions(port=0, model=str(FAMILIES["llama"](tmp_path / "model")))
    for codes in ("fp8", "int8"):
        quantised = replace(options, assignments=(f"cache.kv_dtype={codes}",))
        with pytest.raises(MemoryShort, match=r"cuda:0 .*cache\.kv_dtype \(k, v\) computes on CPUs; use .*=auto"):
            prepare(quantised, 64 * GIB, cards(8 * GIB))
        by_torch = replace(quantised, assignments=(*quantised.assignments, "engine.attention=torch"))
        with pytest.raises(MemoryShort, match=r"cache\.kv_dtype \(k, v\) computes on CPUs"):
            prepare(by_torch, 64 * GIB, cards(8 * GIB))
        assert prepare(quantised, 64 * GIB).here.plans


def test_what_the_child_that_measures_says_is_read_and_why_it_fails_is_told(tmp_path: Path) -> None:
    says = tmp_path / "python"
    says.write_text('#!/bin/sh\necho noise\necho \'[[0, "a card", 9, 5, 90, [1]], [1, "b", 9, 6, 86, []]]\'\n')
    says.chmod(0o755)
    found = read_cards(str(says))
    assert found == (CardFacts(0, "a card", 9, 5, 90, (1,)), CardFacts(1, "b", 9, 6, 86, ()))
    says.write_text("#!/bin/sh\necho first >&2\necho 'CUDA error: out of memory' >&2\nexit 1\n")
    with pytest.raises(ConfigError, match=r"can't be measured: OSError\('CUDA error: out of memory'\)"):
        read_cards(str(says))


def test_a_card_is_measured_with_what_it_can_do_and_whom_it_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "device_count": lambda: 3,
        "mem_get_info": lambda index: (100 - index, 200),
        "get_device_name": lambda index: f"card {index}",
        "get_device_capability": lambda index: (8, 6 + index),
        "can_device_access_peer": lambda index, other: other == index + 1,
    }
    for name, answer in said.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    assert _measure() == [
        (0, "card 0", 200, 100, 86, [1]), (1, "card 1", 200, 99, 87, [2]), (2, "card 2", 200, 98, 88, [])
    ]  # fmt: skip
