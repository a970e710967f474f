"""vLLM's names: each has what ours has that means the same, under one label, and can be left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from tests.router.fake_worker import FakeCluster
from tests.router.http_server import serving
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import Role
from twinpool.router.metrics.vllm_aliases import WorkerTotal, running_and_waiting

MODEL = '{model_name="demo"}'


def worker(name: str, role: Role, incarnation: int = 1, state: str = "ready", **status: Any) -> Any:
    counters = status.pop("counters", {})
    told = SimpleNamespace(state=state, counters=counters, **{"running": 0, "waiting": 0, **status})
    return SimpleNamespace(record=SimpleNamespace(name=name, role=role, incarnation=incarnation), status=told)


def test_each_name_has_what_was_counted() -> None:
    with serving(FakeCluster()) as server:
        server.cluster["prefill-0"].cached = 1
        for _ in range(2):
            server.complete(max_tokens=4)
        text = server.client.get("/metrics").text
        found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        ours = {name: float(value) for name, value in found.items()}
    for theirs, mine in (
        ("generation_tokens_total", "generated_tokens_total"),
        ("prompt_tokens_total", "prompt_tokens_total"),
        ("time_to_first_token_seconds_count", "time_to_first_token_seconds_count"),
        ("inter_token_latency_seconds_sum", "inter_token_latency_seconds_sum"),
        ("request_time_per_output_token_seconds_sum", "time_per_output_token_seconds_sum"),
        ("e2e_request_latency_seconds_sum", "request_duration_seconds_sum"),
        ("request_generation_tokens_sum", "request_generated_tokens_sum"),
        ("request_queue_time_seconds_count", "request_queue_seconds_count"),
    ):
        assert ours[f"vllm:{theirs}{MODEL}"] == ours[f"twinpool_{mine}"], theirs
    assert ours[f"vllm:generation_tokens_total{MODEL}"] == 8
    assert ours[f"vllm:prefix_cache_queries_total{MODEL}"] == ours[f"vllm:prompt_tokens_total{MODEL}"]
    assert ours[f"vllm:prefix_cache_hits_total{MODEL}"] == ours["twinpool_prompt_tokens_cached_total"] == 2
    assert ours[f"vllm:num_requests_running{MODEL}"] == ours[f"vllm:num_requests_waiting{MODEL}"] == 0
    for reason, count in {"stop": 0, "length": 2, "abort": 0, "error": 0}.items():
        assert ours[f'vllm:request_success_total{{finished_reason="{reason}",model_name="demo"}}'] == count


def test_none_of_them_is_there_when_they_are_switched_off() -> None:
    off = config_from_dict({"router": {"metrics_aliases": "none"}})
    with serving(FakeCluster(), config=off) as server:
        text = server.client.get("/metrics").text
    assert "twinpool_requests_in_flight" in text
    assert "vllm:" not in text


def test_a_request_that_prefill_computes_counts_once_though_decode_waits_for_it() -> None:
    workers = [
        worker("prefill-0", Role.PREFILL, running=2, waiting=3),
        worker("decode-0", Role.DECODE, running=4, waiting=6, counters={"retracted": 1.0}),  # 5 of them on prefill
        worker("decode-1", Role.DECODE, state="dead", running=9, waiting=9),
    ]
    core = SimpleNamespace(workers=workers, requests=SimpleNamespace(waiting=7))
    assert running_and_waiting(cast(Any, core)) == (2 + 4, 7 + 3 + 1)


def test_a_colocated_workers_own_queue_counts() -> None:
    workers = [worker("colocated-0", Role.COLOCATED, running=2, waiting=3)]
    core = SimpleNamespace(workers=workers, requests=SimpleNamespace(waiting=0))
    assert running_and_waiting(cast(Any, core)) == (2, 3)


def test_a_total_never_falls_when_workers_start_again_or_leave() -> None:
    total = WorkerTotal(("preemptions",))
    assert total.look([worker("a", Role.PREFILL, counters={"preemptions": 5.0}), worker("b", Role.PREFILL)]) == 5
    assert total.look([worker("a", Role.PREFILL, incarnation=2, counters={"preemptions": 1.0})]) == 6
    assert total.look([worker("a", Role.PREFILL, incarnation=2)]) == 6, "a status without counters takes nothing back"
    assert total.look([]) == 6
