"""Times to first token that clients, tenants and operators ask for, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.router.fake_worker import FakeCluster
from tests.router.http_server import Server, router_config, serving
from twinpool.cli.credential_commands import new_key
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.config.security_config import SecurityConfig
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.key_file import KeyFile, TenantLimits, read_key_file, write_key_file
from twinpool.router.openai.request_headers import SLO_HEADER

COMPLETIONS = "/v1/completions"
ASK = {"prompt": [5, 6, 7], "max_tokens": 4, "seed": 1}


def teach(server: Server, seconds: float = 1.0) -> None:
    """Have every prefill worker known for a second a prompt."""

    def work() -> None:
        for entry in server.service.core.serving(Role.PREFILL):
            now = server.service.clock.now() - 100
            for number in range(10):
                entry.prompts.add(RequestId(f"{number}"), 3, 0, now)
                entry.prompts.computed(RequestId(f"{number}"), now + seconds)
                now += seconds

    server.call(work)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(FakeCluster()) as found:
        teach(found)
        yield found
        found.at_rest()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/v1/messages"])
def test_a_first_token_that_would_be_late_is_a_429_at_once(server: Server, path: str, stream: bool) -> None:
    body = ASK if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    answer = server.post(path, {**body, "stream": stream}, **{SLO_HEADER: "500"})
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) == 1
    assert "after 1,00" in answer.json()["error"]["message"]
    assert "within 500 ms" in answer.json()["error"]["message"]
    assert server.post(path, body, **{SLO_HEADER: "60000"}).status_code == 200
    metrics = server.client.get("/metrics").text
    assert 'twinpool_requests_refused_total{reason="late"} 1.0' in metrics
    assert "twinpool_requests_submitted_total 1.0" in metrics


def test_a_refusal_says_when_there_may_be_room() -> None:
    with serving(FakeCluster()) as server:
        teach(server, 7.2)
        answer = server.post(COMPLETIONS, ASK, **{SLO_HEADER: "1000"})
        assert answer.json()["error"]["code"] == "slo_unreachable"
        assert int(answer.headers["retry-after"]) == 7, "6.2 s and what reading the body took"


@pytest.mark.parametrize("value", ["0", "-5", "1.5", "soon", "1e3", "9" * 30, "\u0661"])
def test_a_header_that_is_no_number_of_milliseconds_is_a_400(server: Server, value: str) -> None:
    answer = server.client.post(COMPLETIONS, json=ASK, headers=[(SLO_HEADER.encode(), value.encode())])
    assert answer.status_code == 400
    assert SLO_HEADER in answer.json()["error"]["message"]


def test_a_client_may_ask_for_less_than_the_operator_and_not_for_more() -> None:
    with serving(FakeCluster(), config=router_config(ttft_slo_ms=2000)) as server:
        teach(server, 1.0)
        asked = {"": 200, "5000": 200, "500": 429}
        for value, status in asked.items():
            headers = {SLO_HEADER: value} if value else {}
            assert server.post(COMPLETIONS, ASK, **headers).status_code == status, value
        teach(server, 60.0)
        assert server.post(COMPLETIONS, ASK, **{SLO_HEADER: "600000"}).status_code == 429
        told = [submit.first_token_s for submit in server.cluster["prefill-0"].submits]
        assert told
        assert all(1.0 < seconds <= 2.0 for seconds in told), "the worker is told what is left of it"
        server.at_rest()


def test_a_tenants_own_time_comes_before_the_servers_and_a_refusal_costs_it_nothing(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    secret = new_key(keys, "acme")
    limits = TenantLimits(ttft_slo_ms=500, requests_per_minute=1)
    write_key_file(keys, KeyFile(read_key_file(keys).keys, {"acme": limits}))
    config = config_from_dict({"router": {"ttft_slo_ms": 60_000}})
    config = Config(router=config.router, security=SecurityConfig(keys_file=str(keys)))
    with serving(FakeCluster(), config=config) as server:
        teach(server)
        headers = {"Authorization": f"Bearer {secret}"}
        for _ in range(3):
            refused = server.post(COMPLETIONS, ASK, **headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "slo_unreachable")
        for _ in range(22):
            teach(server, 0.001)
        assert server.post(COMPLETIONS, ASK, **headers).status_code == 200
        assert server.post(COMPLETIONS, ASK, **headers).json()["error"]["code"] == "tenant_limit"
        server.at_rest()


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_no_worker_could_begin_in_time_is_a_429_too(server: Server, stream: bool) -> None:
    server.cluster["prefill-0"].refusals = [ErrorKind.LATE]
    answer = server.post(COMPLETIONS, {**ASK, "stream": stream}, **{SLO_HEADER: "60000"})
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "slo_unreachable"
    assert "twinpool_requests_shed_total 1.0" in server.client.get("/metrics").text
