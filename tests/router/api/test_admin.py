"""What operators see and do: health, metrics, status, check, drain and undrain."""

from __future__ import annotations

import asyncio
import os
import platform
import threading
import types
from typing import Any

import pytest
from msgspec.structs import replace

from tests.router.fake_worker import FakeCluster
from tests.router.http_server import Server, router_config, serving
from tests.router.service.fake_dashboard import FakeDashboard
from twinpool.contracts.build_id import build_id
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import PAIR, Role, WorkerName
from twinpool.contracts.messages.pool_changes import (
    AddWorkers,
    ChangedWorkers,
    CordonNode,
    OperatorChange,
    RestartWorker,
    ScalePools,
    SettingsChange,
    UncordonNode,
    UndrainWorkers,
)
from twinpool.contracts.messages.router_report import RouterReport
from twinpool.router.openai.request_fields import CHAT, COMPLETION


def operate(server: Server, path: str) -> tuple[int, Any]:
    response = server.client.post(f"/cluster/{path}")
    return response.status_code, response.json()


def refusal(server: Server, path: str) -> tuple[int, str]:
    status, body = operate(server, path)
    return status, body["error"]["message"]


def metric(server: Server, name: str) -> float:
    """The value of a sample, written as Prometheus writes it."""
    lines = server.client.get("/metrics").text.splitlines()
    return float(next(line.rpartition(" ")[2] for line in lines if line.rpartition(" ")[0] == name))


def test_status_says_what_is_served_and_what_runs_now(server: Server) -> None:
    server.call(server.cluster["prefill-0"].pause)
    waiting = threading.Thread(target=server.complete, kwargs={"max_tokens": 2})
    waiting.start()
    server.wait_until(lambda: server.service.core.requests.in_flight == 1)
    told = server.client.get("/cluster/status").json()
    assert (told["model"], told["in_flight"]) == (server.service.spec.name, 1)
    assert 0 <= told["router_up_s"] < 600
    server.call(server.cluster["prefill-0"].resume)
    waiting.join()
    assert server.client.get("/cluster/status").json()["in_flight"] == 0


def test_status_adds_what_other_routers_have_told_to_what_this_one_has_now() -> None:
    """What this router has told of itself is seconds old. Others may have its process id, or be on its host."""

    class Told(FakeDashboard):
        async def routers(self) -> list[RouterReport]:
            here = platform.node(), os.getpid()
            places = (here, 7, 5, 1.0), (("elsewhere", here[1]), 20, 10, 2.5), ((here[0], 1), 300, 100, 4.0)
            return [
                RouterReport("r", node, pid, "build", "demo", in_flight, waiting, tokens_per_s=tokens_per_s)
                for (node, pid), in_flight, waiting, tokens_per_s in places
            ]

    with serving(FakeCluster(1, 1), dashboard=Told()) as server:
        told = server.client.get("/cluster/status").json()
    assert (told["in_flight"], told["waiting"], told["tokens_per_s"]) == (320, 110, 7.5)


def test_health_fails_while_a_role_has_nobody(server: Server) -> None:
    answer = server.client.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    for name in ("decode-0", "decode-1"):
        server.cluster[name].state = "draining"
    server.call(server.cluster.changed)
    answer = server.client.get("/health")
    assert answer.status_code == 503
    assert answer.json()["problems"] == ["no decode worker can serve"]
    assert server.client.get("/live").status_code == 200


@pytest.mark.slow
def test_health_fails_while_work_waits_and_nothing_advances() -> None:
    with serving(FakeCluster(), config=router_config(stall_s=0.05)) as server:
        server.call(server.cluster["prefill-0"].pause)
        waiting = threading.Thread(target=server.complete, kwargs={"max_tokens": 2})
        waiting.start()
        server.wait_until(lambda: server.service.core.progress.stalled_s > 0.05)
        answer = server.client.get("/health")
        assert answer.status_code == 503
        assert "nothing has advanced" in answer.json()["problems"][0]
        server.call(server.cluster["prefill-0"].resume)
        waiting.join(60)
        assert server.client.get("/health").status_code == 200


@pytest.mark.slow
def test_metrics_count_what_legs_report() -> None:
    with serving(FakeCluster(), config=config_from_dict({"transfer": {"plane": "zmq"}})) as server:
        assert metric(server, "twinpool_fallbacks_total") == 0
        server.cluster["prefill-0"].cached = 1
        server.complete(max_tokens=4)
        server.complete(max_tokens=1)
        assert metric(server, 'twinpool_prompt_tokens_computed_total{role="prefill",worker="prefill-0"}') == 4
        assert metric(server, 'twinpool_prompt_tokens_computed_total{role="decode",worker="decode-0"}') == 0
        assert metric(server, 'twinpool_transfer_bytes_total{plane="zmq"}') == 20
        assert metric(server, "twinpool_prompt_tokens_cached_total") == 2
        assert metric(server, "twinpool_generated_tokens_total") == 5
        assert metric(server, "twinpool_time_to_first_token_seconds_count") == 2
        assert metric(server, "twinpool_inter_token_latency_seconds_count") == 3
        assert metric(server, "twinpool_time_per_output_token_seconds_count") == 1, "the other has one token"
        assert metric(server, "twinpool_request_duration_seconds_count") == 2
        assert metric(server, "twinpool_requests_in_flight") == 0
        assert metric(server, 'twinpool_workers_serving{role="decode"}') == 1
        server.cluster["decode-0"].refusals = [ErrorKind.DAMAGED]
        server.complete(max_tokens=4)
        assert metric(server, "twinpool_handovers_damaged_total") == 1
        assert metric(server, "twinpool_replays_total") == 1


def test_what_the_tiers_did_is_in_status_and_metrics(server: Server) -> None:
    server.cluster["prefill-0"].counters = {
        "hit_tokens_host": 64.0, "pages_damaged_in_storage": 2.0, "host_pages_total": 9.0, "pages_loaded": 4.0,
    }  # fmt: skip
    server.cluster["decode-0"].counters = {
        "pages_damaged": 1.0, "retractions": 5.0, "resumptions": 3.0, "resumed_bytes": 640.0, "retracted": 2.0,
    }  # fmt: skip
    server.call(server.cluster.changed)
    told = {w["name"]: w["counters"] for w in server.client.get("/cluster/status").json()["workers"]}
    assert told["prefill-0"]["hit_tokens_host"] == 64
    assert told["prefill-1"] == {}
    of_prefill = 'role="prefill"'
    for sample, value in (
        (f'twinpool_cache_hit_tokens_total{{{of_prefill},tier="host",worker="prefill-0"}}', 64),
        (f'twinpool_state_damage_total{{{of_prefill},where="storage",worker="prefill-0"}}', 2),
        (f'twinpool_kv_capacity_pages{{{of_prefill},tier="host",worker="prefill-0"}}', 9),
        (f'twinpool_cache_moved_pages_total{{{of_prefill},tier="device",what="loaded",worker="prefill-0"}}', 4),
        ('twinpool_state_damage_total{role="decode",where="handover",worker="decode-0"}', 1),
        ('twinpool_retractions_total{role="decode",worker="decode-0"}', 5),
        ('twinpool_retractions_ended_total{outcome="resumed",role="decode",worker="decode-0"}', 3),
        ('twinpool_retracted_bytes_total{role="decode",way="back",worker="decode-0"}', 640),
        ('twinpool_requests_retracted{role="decode",worker="decode-0"}', 2),
    ):
        assert metric(server, sample) == value
    assert 'worker="prefill-1"' not in "".join(
        line for line in server.client.get("/metrics").text.splitlines() if line.startswith("twinpool_cache")
    )


def test_status_shows_every_worker_in_order(server: Server) -> None:
    workers = server.client.get("/cluster/status").json()["workers"]
    assert [w["name"] for w in workers] == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    expected = {
        "name",
        "role",
        "state",
        "pid",
        "node",
        "incarnation",
        "running",
        "waiting",
        "pages_total",
        "pages_free",
    }
    assert expected <= workers[0].keys()
    assert (workers[0]["role"], workers[0]["state"], workers[0]["pages_total"]) == ("prefill", "ready", 100)


def test_how_a_worker_ended_last_is_the_controllers_to_say(server: Server) -> None:
    links = server.service.worker_links

    def told() -> None:
        links.views = tuple(replace(view, status=replace(view.status, last_end="killed")) for view in links.views)

    server.call(told)
    rows = server.client.get("/cluster/status").json()["workers"]
    assert {row["last_end"] for row in rows} == {"killed"}
    server.call(server.cluster.changed)


def test_a_worker_that_does_not_answer_is_shown_and_holds_nobody_up(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinpool.router.api.admin_status.STATUS_DEADLINE_S", 0.05)
    monkeypatch.setattr("twinpool.router.api.admin_status.CHECK_DEADLINE_S", 0.05)
    server.cluster["decode-1"].hangs = True
    states = {w["name"]: w["state"] for w in server.client.get("/cluster/status").json()["workers"]}
    assert states["decode-1"] == "unreachable"
    assert states["decode-0"] == "ready"
    status, report = operate(server, "check")
    assert status == 200
    assert report["ok"] is False
    assert [w["name"] for w in report["workers"] if w["violations"]] == ["decode-1"]


def test_check_passes_at_rest_and_names_what_is_planted(server: Server) -> None:
    server.complete(max_tokens=3)
    status, report = operate(server, "check")
    assert (status, report["ok"]) == (200, True)
    assert report["workers"][0] == {
        "name": "prefill-0",
        "checked": {"pages": 100, "slots": 0, "leases": 0, "rooms": 0, "kept_answers": 0},
        "violations": [],
    }
    server.cluster["prefill-1"].violations = ("page 7 is free and leased",)
    report = operate(server, "check")[1]
    assert report["ok"] is False
    assert report["workers"][1]["violations"] == ["page 7 is free and leased"]
    server.cluster["prefill-1"].violations = ()
    server.service.admission.choices -= 1
    ghost: Any = "ghost"
    request = types.SimpleNamespace(pixels=0)
    nobody: Any = (types.SimpleNamespace(tenant="", answer_key=""), types.SimpleNamespace(request=request))
    server.call(lambda: server.service.answers.owners.update({ghost: nobody}))
    report = operate(server, "check")[1]
    server.call(lambda: server.service.answers.owners.pop(ghost))
    server.service.admission.choices += 1
    assert report["ok"] is False
    assert report["workers"][-1]["name"] == "router"
    assert "ghost" in report["workers"][-1]["violations"][0]


def test_drain_stops_placement_and_undrain_brings_it_back(server: Server) -> None:
    status, line = operate(server, "drain/decode-0")
    assert (status, line["state"]) == (200, "draining")
    for _ in range(4):
        server.complete(max_tokens=3)
    assert not server.cluster["decode-0"].submits
    status, line = operate(server, "drain/decode-0")
    assert (status, line["state"], line["outcome"]) == (200, "draining", "drains already"), "who asks again follows it"
    assert operate(server, "undrain/decode-0")[0] == 200
    assert refusal(server, "undrain/decode-0")[0] == 409
    for _ in range(2):
        server.complete(max_tokens=3)
    assert server.cluster["decode-0"].submits


def test_a_drain_is_taken_back_also_while_the_table_shows_what_was_before(server: Server) -> None:
    """A heartbeat that was under way when the worker was told comes after its answer."""
    assert operate(server, "drain/decode-0")[0] == 200
    fake = server.cluster["decode-0"]
    fake.state = "ready"
    server.call(server.cluster.changed)
    fake.state = "draining"
    assert operate(server, "undrain/decode-0")[0] == 200
    assert fake.state == "ready"
    assert refusal(server, "undrain/decode-0")[0] == 409


def test_d1_a_worker_that_was_told_to_leave_is_not_counted_on_before_it_has_answered(server: Server) -> None:
    """Two operators at once, or one whose first drain is slow to arrive: somebody of the role stays."""
    service = server.service
    told = service.core.workers.named("decode-0")
    assert told is not None
    server.call(lambda: told.request_drain(service.clock.now()))
    status, message = refusal(server, "drain/decode-1")
    assert status == 409
    assert message.startswith("decode-1 is the last decode worker that serves")
    assert refusal(server, "role/decode-1?role=prefill")[0] == 409
    server.call(told.cancel_drain)
    assert operate(server, "drain/decode-1")[0] == 200
    assert service.core.workers.staying(Role.DECODE, service.clock.now()) == [told]


def test_the_last_worker_of_a_role_is_drained_by_force_only(server: Server) -> None:
    assert operate(server, "drain/prefill-0")[0] == 200
    status, message = refusal(server, "drain/prefill-1")
    assert status == 409
    assert "prefill-1 is the last prefill worker" in message
    assert operate(server, "drain/prefill-1?force=true")[0] == 200
    assert server.client.get("/health").status_code == 503


@pytest.mark.parametrize(("kept", "last"), [("prefill-0", "decode"), ("decode-0", "prefill")])
def test_a_node_that_has_the_last_workers_of_one_of_its_roles_is_drained_by_force_only(
    server: Server, kept: str, last: str
) -> None:
    cluster = server.cluster
    for name, worker in cluster.workers.items():
        worker.node = "here" if name == kept else "there"
    server.call(cluster.changed)
    status, body = operate(server, "drain/there")
    assert status == 409
    assert body["error"]["message"].startswith(f"there is the last {last} worker that serves")
    assert {worker.state for worker in cluster.workers.values()} == {"ready"}
    assert operate(server, "drain/there?force=true")[0] == 200


def test_unknown_and_gone_workers_are_named(server: Server) -> None:
    status, message = refusal(server, "drain/prefill-9")
    assert status == 404
    assert "prefill-0, prefill-1" in message
    server.cluster["decode-1"].state = "left"
    server.call(server.cluster.changed)
    assert refusal(server, "drain/decode-1")[0] == 409
    status, line = operate(server, "undrain/decode-1")
    assert (status, line["outcome"]) == (200, "starts again")


def test_a_worker_that_refuses_as_draining_before_the_table_says_so_costs_nothing(server: Server) -> None:
    server.cluster["decode-0"].state = "draining"  # nobody was told
    for _ in range(4):
        assert server.complete(max_tokens=3)["usage"]["completion_tokens"] == 3
    assert server.service.core.counts.refusals >= 1


def test_cluster_endpoints_are_for_this_machine_or_the_token(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.client.get("/cluster/status", headers={"Origin": "http://evil.example"}).status_code == 403
    monkeypatch.setenv("TWINPOOL_ADMIN_TOKEN", "s3cret")
    far = {"Origin": "http://evil.example", "Authorization": "Bearer wrong"}
    assert server.client.get("/cluster/status", headers=far).status_code == 403
    far["Authorization"] = "Bearer s3cret"
    assert server.client.get("/cluster/status", headers=far).status_code == 200


def test_a_token_that_is_set_is_asked_for_on_loopback_too(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes through a proxy on this machine comes from loopback."""
    monkeypatch.setenv("TWINPOOL_ADMIN_TOKEN", "s3cret")
    for path, ask in (
        ("status", server.client.get),
        ("check", server.client.post),
        ("drain/decode-0", server.client.post),
    ):
        answer = ask(f"/cluster/{path}")
        assert answer.status_code == 403, path
        assert "TWINPOOL_ADMIN_TOKEN" in answer.json()["error"]["message"]
        for given in ("Bearer s3cre", "Bearer s3crets", "Bearer S3CRET", "Bearer", "", "Basic s3cret"):
            assert ask(f"/cluster/{path}", headers={"Authorization": given}).status_code == 403, given
    assert server.cluster["decode-0"].state == "ready"
    good = {"Authorization": "Bearer s3cret"}
    assert server.client.post("/cluster/drain/decode-0", headers=good).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Forwarded-For": "203.0.113.9"}, {"Forwarded": "for=203.0.113.9"}, {"Via": "1.1 proxy"},
        {"X-Real-IP": "203.0.113.9"}, {"Host": "llm.example.com"}, {"Host": "llm.example.com:8000"},
        {"Origin": "http://127.0.0.1:8000"},
    ],
)  # fmt: skip
def test_without_a_token_a_proxy_on_this_machine_does_not_open_the_cluster(
    server: Server, headers: dict[str, str]
) -> None:
    answer = server.client.post("/cluster/drain/decode-0?force=true", headers=headers)
    assert answer.status_code == 403
    assert server.cluster["decode-0"].state == "ready"


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:8000", "127.0.0.5:1"])
def test_the_operator_on_this_machine_needs_no_token(server: Server, host: str) -> None:
    assert server.client.get("/cluster/status", headers={"Host": host}).status_code == 200


def test_a_router_that_has_seen_no_table_yet_does_not_say_that_nobody_is_there() -> None:
    """`twinpool drain` takes a worker that has no row any more for one that has left."""

    class Silent(FakeCluster):
        def watch(self, on_change: Any) -> Any:
            self._watchers.append(on_change)
            return lambda: None

    with serving(Silent(0, 0)) as server:
        for path, ask in (("status", server.client.get), ("drain/decode-0", server.client.post)):
            answer = ask(f"/cluster/{path}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "starting")
        server.call(server.cluster.changed)
        answer = server.client.get("/cluster/status").json()
        assert (answer["workers"], answer["router_build"]) == ([], build_id())


def test_a_node_is_drained_through_the_controller_with_an_outcome_for_each_of_its_workers(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them drains already, one can't be reached, one has left: none hides another."""
    cluster = server.cluster
    assert operate(server, "drain/decode-0")[0] == 200
    cluster["prefill-1"].state = "left"
    server.call(cluster.changed)
    link = server.service.worker_links._links[cluster["decode-1"].name, cluster["decode-1"].incarnation]
    nobody = types.SimpleNamespace(name="decode-1", hangs=False, alive=False)
    monkeypatch.setattr(link.port, "worker", nobody)
    cluster.told.clear()
    status, answer = operate(server, "drain/here?force=true")
    assert status == 200
    assert answer["is_node"]
    assert ("drain", "here") in cluster.told, "the controller cordons it"
    outcomes = {row["name"]: (row["state"], row["outcome"]) for row in answer["workers"]}
    assert outcomes["decode-0"] == ("draining", "drains already")
    assert outcomes["prefill-0"] == ("draining", "drains")
    assert outcomes["decode-1"][0] == "unreachable"
    assert "the controller tells it with its next heartbeat" in outcomes["decode-1"][1]
    assert "prefill-1" not in outcomes


def test_a_node_is_not_drained_while_the_controller_is_away_and_a_worker_is(server: Server) -> None:
    """Without it others would land on the node; a worker hears of its drain from the router as well."""
    server.cluster.away = True
    status, message = refusal(server, "drain/here?force=true")
    assert status == 503
    assert "the controller can't be reached" in message
    assert {w.state for w in server.cluster.workers.values()} == {"ready"}
    assert operate(server, "drain/decode-0")[0] == 200
    assert server.cluster["decode-0"].state == "draining"


@pytest.mark.parametrize(("force", "kept"), [("", (Role.PREFILL, Role.DECODE)), ("?force=true", ())])
def test_the_controller_is_told_which_roles_must_keep_a_worker(
    server: Server, force: str, kept: tuple[Role, ...]
) -> None:
    assert operate(server, f"drain/decode-1{force}")[0] == 200
    assert server.cluster.told == [("drain", "decode-1")]
    assert server.cluster.kept == kept


@pytest.mark.parametrize("target", ["decode-1", "there"])
def test_d1_a_drain_that_the_controller_refuses_is_none(server: Server, target: str) -> None:
    """Another router has drained the other worker, and this one's table doesn't show it yet."""
    server.cluster["decode-1"].node = "there"
    server.call(server.cluster.changed)
    server.cluster.refuses = "decode-1 is the last decode worker that stays"
    status, message = refusal(server, f"drain/{target}")
    assert status == 409
    assert message == "decode-1 is the last decode worker that stays"
    assert server.cluster["decode-1"].state == "ready"
    server.cluster.refuses = ""
    assert len(server.service.core.workers.staying(Role.DECODE, server.service.clock.now())) == 2


def test_a_worker_that_the_router_can_not_reach_is_told_by_the_controller(server: Server) -> None:
    server.cluster["decode-0"].alive = False
    status, line = operate(server, "drain/decode-0?force=true")
    assert (status, line["state"]) == (200, "unreachable")
    assert server.cluster.told == [("drain", "decode-0")]
    assert line["outcome"].endswith("the controller tells it with its next heartbeat")
    server.cluster["decode-0"].alive = True


def test_a_worker_that_nobody_can_reach_is_not_said_to_drain(server: Server) -> None:
    server.cluster.away = True
    server.cluster["decode-0"].alive = False
    status, message = refusal(server, "drain/decode-0?force=true")
    assert status == 503
    assert "decode-0 can't be reached" in message
    server.cluster["decode-0"].alive = True


def test_a_node_without_workers_can_be_drained_if_the_controller_knows_it(server: Server) -> None:
    status, message = refusal(server, "drain/another-host")
    assert status == 404
    assert "another-host" in message
    assert "prefill-0" in message


@pytest.mark.parametrize(
    ("name", "is_it"),
    [
        ("there", True), ("0123456789", True), ("01234567", True),
        ("0123456", False), ("ther", False), ("12345678", False),
    ],
)  # fmt: skip
def test_a_node_is_named_by_its_host_or_by_eight_characters_of_its_id(server: Server, name: str, is_it: bool) -> None:
    cluster = server.cluster
    for worker in ("prefill-1", "decode-1"):
        cluster[worker].node, cluster[worker].node_id = "there", "0123456789"
    for worker in ("prefill-0", "decode-0"):
        cluster[worker].node_id = "abcdefghij"
    server.call(cluster.changed)
    status, answer = operate(server, f"drain/{name}")
    assert status == (200 if is_it else 404)
    drained = {worker for worker, fake in cluster.workers.items() if fake.state == "draining"}
    assert drained == ({"prefill-1", "decode-1"} if is_it else set())
    if is_it:
        assert {row["name"] for row in answer["workers"]} == drained


def test_a_worker_changes_its_role_through_the_controller(server: Server) -> None:
    server.cluster.told.clear()
    status, answer = operate(server, "role/decode-0?role=prefill")
    assert (status, answer["name"], answer["role"], answer["incarnation"]) == (
        200, "decode-0", "prefill", server.cluster["decode-0"].incarnation,
    )  # fmt: skip
    assert server.cluster.told == [("prefill", "decode-0")]
    core = server.service.core
    staying = server.call(lambda: core.workers.staying(Role.DECODE, server.service.clock.now()))
    assert [entry.record.name for entry in staying] == ["decode-1"], "nobody counts on it as a decode worker"


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("decode-0?role=decode", 409, "decode-0 is a decode worker already"),
        ("decode-0?role=both", 409, "role must be prefill or decode, got 'both'"),
        ("decode-0", 409, "role must be prefill or decode, got ''"),
        ("decode-1?role=prefill", 409, "decode-1 is draining: only a ready worker changes its role"),
        (
            "decode-0?role=prefill",
            409,
            "decode-0 is the last decode worker that serves, and nothing is answered without one: start another first "
            "(twinpool add decode), or make it a prefill worker all the same with --force",
        ),
        ("here?role=prefill", 404, "no worker is named 'here'"),
        ("decode-9?role=prefill", 404, "no worker is named 'decode-9'"),
    ],
)
def test_a_role_that_can_not_be_changed_is_refused_and_the_controller_hears_nothing(
    server: Server, path: str, status: int, says: str
) -> None:
    assert operate(server, "drain/decode-1")[0] == 200
    server.cluster.told.clear()
    answer, message = refusal(server, f"role/{path}")
    assert (answer, message[: len(says)]) == (status, says)
    assert server.cluster.told == []


def test_the_last_worker_of_a_role_changes_it_by_force_which_the_controller_is_told(server: Server) -> None:
    assert operate(server, "drain/decode-1")[0] == 200
    server.cluster.told.clear()
    assert operate(server, "role/decode-0?role=prefill&force=true")[0] == 200
    assert server.cluster.told == [("prefill", "decode-0"), ("empty", "decode-0")]


def test_a_role_is_not_changed_while_the_controller_is_away_and_the_refusal_says_so(server: Server) -> None:
    server.cluster.away = True
    response = server.client.post("/cluster/role/decode-0?role=prefill")
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (503, "down")
    assert error["message"] == "the controller can't be reached: the controller is away"


def test_a_role_whose_change_the_controller_refuses_leaves_the_worker_where_it_was(server: Server) -> None:
    server.cluster.refuses = "decode-1 is starting elsewhere"
    assert refusal(server, "role/decode-1?role=prefill") == (409, "decode-1 is starting elsewhere")
    server.cluster.refuses = ""
    assert operate(server, "drain/decode-0")[0] == 200, "decode-1 stays, so decode-0 is not the last"


def test_the_openapi_document_lists_what_is_served(server: Server) -> None:
    from twinpool.router.api.app import FRONT_ROUTES, PREFIX_ROUTES, ROUTES

    document = server.client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.")
    served = {*ROUTES, *FRONT_ROUTES} | {p.rstrip("/") for p in PREFIX_ROUTES}
    assert {p.partition("/{")[0] for p in document["paths"]} == served
    for path, known in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        fields = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
        assert known.keys() <= fields.keys()


def incarnation(server: Server, name: str) -> int:
    entry = server.service.core.workers.named(name)
    assert entry is not None
    return entry.record.incarnation


def test_changes_of_pools_go_to_the_controller_as_they_were_asked_for(server: Server) -> None:
    server.cluster.answer = (WorkerName("decode-2"), WorkerName("decode-1"))
    for path, change in (
        ("add?role=decode", AddWorkers(Role.DECODE, 1)),
        ("add?role=prefill&count=3&node=n%201", AddWorkers(Role.PREFILL, 3, "n 1")),
        ("scale?prefill=2&decode=1", ScalePools({Role.PREFILL: 2, Role.DECODE: 1})),
        ("scale?decode=0&force=true", ScalePools({Role.DECODE: 0}, empty=True)),
        ("cordon/here", CordonNode("here")),
        ("uncordon/a%2Fb", UncordonNode("a/b")),
    ):
        status, body = operate(server, path)
        assert status == 200, body
        assert server.cluster.changes.pop() == change
    server.cluster["decode-1"].state = "ready"
    _, body = operate(server, "scale?decode=2")
    assert [(row["name"], row["incarnation"], row["outcome"]) for row in body["workers"]] == [
        ("decode-2", 0, "starts"), ("decode-1", incarnation(server, "decode-1"), "leaves")
    ]  # fmt: skip


@pytest.mark.parametrize("state", ["ready", "starting", "dead", "left"])
@pytest.mark.parametrize("fate", ["starts", "leaves"])
def test_who_starts_and_who_leaves_is_what_the_controller_says(server: Server, state: str, fate: str) -> None:
    """This router's table is older: it may show a worker as dead that was to start again, and isn't wanted any more."""
    name = WorkerName("decode-1")
    server.cluster[name].state = state
    server.call(server.cluster.changed)
    server.cluster.answer = (name,)
    both = frozenset({name}), frozenset[WorkerName]()
    server.cluster.fates = both if fate == "starts" else both[::-1]
    _, body = operate(server, "scale?decode=2")
    assert [row["outcome"] for row in body["workers"]] == [fate]


def test_a_worker_is_restarted_through_the_controller_but_not_the_last_of_its_role(server: Server) -> None:
    server.cluster.answer = (WorkerName("decode-1"),)
    status, body = operate(server, "restart/decode-1")
    assert (status, body["workers"]) == (
        200,
        [{"name": "decode-1", "incarnation": incarnation(server, "decode-1"), "outcome": "leaves and starts again"}],
    )  # fmt: skip
    assert server.cluster.changes == [RestartWorker(WorkerName("decode-1"), keep=PAIR)]
    assert refusal(server, "restart/decode-0")[0] == 409, "decode-1 is on its way out"
    assert len(server.cluster.changes) == 1
    assert operate(server, "restart/decode-0?force=true")[0] == 200
    assert server.cluster.changes[1:] == [RestartWorker(WorkerName("decode-0"))]
    assert refusal(server, "restart/decode-9") == (
        404, "no worker is named 'decode-9'; there are: decode-0, decode-1, prefill-0, prefill-1"
    )  # fmt: skip


def test_a_refused_restart_leaves_the_worker_where_it_was(server: Server) -> None:
    server.cluster.answer = "the ledger is full"
    assert refusal(server, "restart/decode-1") == (409, "the ledger is full")
    server.cluster.away = True
    status, message = refusal(server, "restart/decode-1")
    assert (status, "controller can't be reached" in message) == (503, True)
    server.cluster.away = False
    assert operate(server, "drain/decode-0")[0] == 200, "decode-1 stays, so decode-0 is not the last"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("add", "a role is prefill, decode, colocated; got ''"),
        ("add?role=cook", "got 'cook'"),
        ("add?role=decode&count=many", "count must be a whole number of workers"),
        ("add?role=decode&count=2000", "at most 1024"),
        ("scale", "name a pool"),
        ("scale?decode=-1", "got '-1'"),
        ("scale?dekode=1", "got 'dekode'"),
    ],
)
def test_a_change_of_pools_that_means_nothing_is_refused_here(server: Server, path: str, words: str) -> None:
    status, message = refusal(server, path)
    assert status == 400
    assert words in message
    assert server.cluster.changes == []


def test_settings_are_passed_on_and_the_answer_is_the_supervisors(server: Server) -> None:
    answer = server.client.post("/cluster/apply?dry_run=true", json={"decode": {"retract_limit": 4}})
    assert (answer.status_code, answer.json()) == (
        200,
        {
            "changed": [{"key": "a.b", "before": "1", "after": "2", "roles": ["decode"], "by": "routers"}],
            "digests": {"decode": "d"},
            "behind": 2,
            "trouble": "it is stuck",
        },
    )
    server.client.post("/cluster/apply", json={})
    assert server.cluster.settings == [
        SettingsChange('{"decode": {"retract_limit": 4}}', dry_run=True),
        SettingsChange("{}"),
    ]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff"])
def test_settings_that_are_no_object_are_refused(server: Server, body: bytes) -> None:
    answer = server.client.post("/cluster/apply", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid")
    assert server.cluster.settings == []


def test_settings_that_are_refused_or_reach_nobody_say_why(server: Server) -> None:
    server.cluster.answer = "decode.tp can't be changed"
    answer = server.client.post("/cluster/apply", json={"decode": {"tp": 2}})
    assert (answer.status_code, answer.json()["error"]["message"]) == (409, "decode.tp can't be changed")
    server.cluster.away = True
    answer = server.client.post("/cluster/apply", json={})
    assert answer.status_code == 503
    assert "controller" in answer.json()["error"]["message"]
    assert server.client.post("/cluster/apply", content=b"x" * 300_000).status_code == 413


def test_status_says_what_settings_each_worker_was_started_with(server: Server) -> None:
    rows = server.client.get("/cluster/status").json()["workers"]
    assert {row["settings"] for row in rows} == {""}


def test_the_last_of_two_orders_about_a_worker_is_what_it_does(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller takes its time over a drain; the undrain that comes meanwhile is told to nobody before it."""
    told: list[str] = []
    gate: list[asyncio.Event] = []
    change_pools = server.cluster.change_pools

    async def change(change: OperatorChange) -> ChangedWorkers:
        if isinstance(change, UndrainWorkers):
            told.append("undrain")
            return await change_pools(change)
        changed = await change_pools(change)
        told.append("drain")
        gate.append(asyncio.Event())
        await gate[0].wait()
        return changed

    monkeypatch.setattr(server.cluster, "change_pools", change)
    orders = [threading.Thread(target=operate, args=(server, f"{order}/decode-0")) for order in ("drain", "undrain")]
    orders[0].start()
    server.wait_until(lambda: bool(gate))
    orders[1].start()
    server.wait_until(lambda: bool(server.service.orders._waiters))
    assert told == ["drain"]
    server.call(gate[0].set)
    for order in orders:
        order.join(60)
    assert told == ["drain", "undrain"]
    assert server.cluster["decode-0"].state == "ready"
    server.wait_until(server.serves)
