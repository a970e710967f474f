"""Several models behind one endpoint: which of them answers, who may ask for which, and what is told of all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.router.fake_worker import FakeCluster
from tests.router.http_server import Server, serving
from tests.router.security.leasing_routers import LedgerLessor
from twinpool.cli.credential_commands import new_key
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.security_config import SecurityConfig
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.key_file import TenantLimits, read_key_file, write_key_file
from twinpool.contracts.messages.pool_changes import FlushCaches
from twinpool.router.models_app import ModelSwitch

COMPLETIONS = "/v1/completions"
ASK = {"prompt": [5, 6, 7], "max_tokens": 4, "seed": 1}


@pytest.fixture
def other() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def server(other: FakeCluster) -> Iterator[Server]:
    with serving(FakeCluster(), others={"other": other}) as found:
        found.wait_until(lambda: _serves(found, "other"))
        yield found
        at_rest(found, other)


def _serves(server: Server, name: str) -> bool:
    core = server.others[name].core
    return all(core.serving(role) for role in core.workers.roles)


def at_rest(server: Server, other: FakeCluster) -> None:
    server.at_rest()
    server.wait_until(lambda: not other.leftovers())
    assert server.call(server.others["other"].check) == []
    assert server.service.buffer.held == 0
    assert server.service.answering == 0


def asked(cluster: FakeCluster) -> int:
    return sum(len(worker.submits) for worker in cluster.workers.values())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_goes_to_the_cluster_of_the_model_that_it_names(
    server: Server, other: FakeCluster, stream: bool
) -> None:
    if stream:
        events = server.stream(COMPLETIONS, {**ASK, "model": "other"})
        assert isinstance(events[0], dict)
        assert events[0]["model"] == "other"
    else:
        assert server.complete(**ASK, model="other")["model"] == "other"
    assert (asked(other), asked(server.cluster)) == (2, 0)
    assert server.complete(**ASK, model="demo")["model"] == "demo"
    assert (asked(other), asked(server.cluster)) == (2, 2)


@pytest.mark.parametrize(
    ("model", "status", "word"),
    [({"model": "neither"}, 404, "'demo', 'other'"), ({}, 400, "'demo', 'other'"), ({"model": 7}, 400, "string")],
)
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/tokenize"])
def test_one_that_names_no_model_of_here_is_told_which_there_are(
    server: Server, path: str, model: dict[str, object], status: int, word: str
) -> None:
    error = server.refused(path, {**ASK, **model}, status)
    assert word in error["message"]
    assert error["param"] == "model"


def test_a_body_that_is_no_object_is_refused_as_by_one_model(server: Server) -> None:
    for body in (b"{", b"[1]", b"", b"\xff\xff", b"[" * 1500):
        response = server.client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, body
    response = server.client.post(COMPLETIONS, content=b"x", headers={"Content-Type": "image/png"})
    assert response.status_code == 415


def test_the_list_has_all_models_with_their_state(server: Server, other: FakeCluster) -> None:
    def states() -> dict[str, str]:
        return {one["id"]: one["state"] for one in server.client.get("/v1/models").json()["data"]}

    assert states() == {"demo": "ready", "other": "ready"}
    assert server.client.get("/v1/models/other").json()["id"] == "other"
    assert server.client.get("/v1/models/neither").status_code == 404

    def die() -> None:
        other["decode-0"].die()
        other.changed()

    server.call(die)
    server.wait_until(lambda: not _serves(server, "other"))
    assert states() == {"demo": "ready", "other": "unavailable"}
    health = server.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "degraded")
    assert health.json()["problems"] == ["other: no decode worker can serve"]
    assert server.complete(**ASK, model="demo")
    server.call(lambda: other.restart("decode-0"))


def test_health_fails_where_no_model_can_be_served(server: Server, other: FakeCluster) -> None:
    def die() -> None:
        for cluster in (server.cluster, other):
            cluster["prefill-0"].die()
            cluster.changed()

    server.call(die)
    server.wait_until(lambda: not _serves(server, "other"))
    health = server.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "unhealthy")
    for cluster in (server.cluster, other):
        server.call(partial(cluster.restart, "prefill-0"))
    server.wait_until(lambda: _serves(server, "other"))


def test_operators_name_the_model_of_their_change(server: Server, other: FakeCluster) -> None:
    refused = server.client.post("/v1/flush", json={"wait": False})
    assert refused.status_code == 400
    assert "'demo', 'other'" in refused.json()["error"]["message"]
    assert server.client.post("/v1/flush?model=neither", json={"wait": False}).status_code == 404
    assert not server.cluster.changes
    assert not other.changes
    assert server.client.post("/v1/flush?model=other", json={"wait": False}).status_code == 202
    assert [type(one) for one in other.changes] == [FlushCaches]
    assert not server.cluster.changes
    assert server.client.get("/cluster/status?model=other").json()["model"] == "other"
    assert server.client.post("/cluster/drain/decode-0?model=other").status_code in (200, 409)
    assert not server.cluster.told


def test_metrics_have_the_model_as_a_label_and_each_name_once(server: Server) -> None:
    server.complete(**ASK, model="other")
    text = server.client.get("/metrics").text
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    ended = {
        sample.labels["model"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "twinpool_requests_ended_total"
    }
    assert ended == {"demo": 0.0, "other": 1.0}
    of_process = {sample.name: sample.labels for family in families for sample in family.samples}
    assert "model" not in of_process["process_cpu_seconds_total"]
    assert server.client.get("/metrics", headers={"Accept": "application/openmetrics-text"}).text.endswith("# EOF\n")


def test_a_drain_waits_for_the_answers_of_all_models_and_refuses_new_ones_of_all(other: FakeCluster) -> None:
    with serving(FakeCluster(), others={"other": other}) as server:
        server.wait_until(lambda: _serves(server, "other"))
        server.call(other["decode-0"].pause)
        with server.client.stream("POST", COMPLETIONS, json={**ASK, "model": "other", "stream": True}) as response:
            server.call(server.uvicorn.asked_to_end)
            for model in ("demo", "other"):
                assert server.refused(COMPLETIONS, {**ASK, "model": model}, 503)["code"] == "shutting_down"
            assert server.client.get("/health").json()["status"] == "draining"
            server.call(other["decode-0"].resume)
            assert response.read().endswith(b"data: [DONE]\n\n")
        server.wait_ended()
    assert not other.leftovers()
    assert server.others["other"].check() == []


def test_two_models_of_one_name_are_refused(server: Server) -> None:
    with pytest.raises(ConfigError, match="two models are served as demo"):
        ModelSwitch([server.service, server.service])


# ---------------------------------------------------------------- keys


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def test_a_key_may_be_of_some_models_alone(keys: Path, other: FakeCluster) -> None:
    secret, stranger = new_key(keys, "acme"), new_key(keys, "nobody")
    limits = {"acme": TenantLimits(models=("other",)), "nobody": TenantLimits(models=("third",))}
    write_key_file(keys, replace(read_key_file(keys), tenants=limits))
    config = Config(security=SecurityConfig(keys_file=str(keys)))
    with serving(FakeCluster(), config=config, others={"other": other}) as server:
        assert server.post(COMPLETIONS, {**ASK, "model": "other"}, **bearer(secret)).status_code == 200
        for path in (COMPLETIONS, "/tokenize"):
            refused = server.post(path, {**ASK, "model": "demo"}, **bearer(secret))
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
            assert server.post(path, {**ASK, "model": "other"}, **bearer(stranger)).status_code == 403
            assert server.post(path, {**ASK, "model": "other"}).status_code == 401
        assert not server.cluster["prefill-0"].submits
        at_rest(server, other)


def test_the_limits_of_a_tenant_hold_for_all_models_together(keys: Path, other: FakeCluster) -> None:
    secret = new_key(keys, "acme")
    write_key_file(keys, replace(read_key_file(keys), tenants={"acme": TenantLimits(requests_per_minute=3)}))
    config = Config(security=SecurityConfig(keys_file=str(keys)))
    with serving(FakeCluster(), config=config, others={"other": other}, lessor=LedgerLessor()) as server:
        models = ["demo", "other"] * 4
        found = [server.post(COMPLETIONS, {**ASK, "model": model}, **bearer(secret)) for model in models]
        assert [one.status_code for one in found].count(200) == 3
        assert {one.status_code for one in found} == {200, 429}
        at_rest(server, other)
