"""What `GET /` tells: a page to browsers, JSON to programs, and to strangers nothing that `/health` doesn't tell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.router.fake_worker import FakeCluster
from tests.router.http_server import WAIT_S, Server, demo_spec, serving
from twinpool.cli.credential_commands import new_key
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.security_config import SecurityConfig
from twinpool.router.api.admin_models import SERVED_PATHS
from twinpool.router.api.app import OPERATORS

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def get(url: str, **headers: str) -> httpx.Response:
    with httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False) as client:
        return client.get("/", headers=headers)


def test_a_program_gets_json_with_the_model_and_every_endpoint(server: Server) -> None:
    answer = get(server.url, Accept="*/*")
    assert answer.headers["content-type"] == "application/json"
    told: dict[str, Any] = answer.json()
    assert (told["server"], told["status"], told["needs_key"]) == ("twinpool", "ok", False)
    assert told["models"] == list(server.service.spec.names)
    paths = {one["path"] for one in told["endpoints"]}
    assert {"/v1/chat/completions", "/v1/models/{model}", "/health", "/cluster/status"} < paths
    documented = server.client.get(told["reference"]).json()["paths"]
    assert paths == documented.keys() - {"/"}
    assert server.client.get(told["dashboard"]).status_code == 200


def test_a_browser_gets_a_page_whose_links_lead_somewhere_and_that_runs_nothing(server: Server) -> None:
    answer = get(server.url, **BROWSER)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "script" not in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert f"<b>{server.service.spec.names[0]}</b>" in answer.text
    links = re.findall(r"href=([^ >]+)", answer.text)
    assert {"/dashboard", "/health", "/openapi.json"} == set(links)
    for link in links:
        assert server.client.get(link).status_code == 200


def test_a_name_can_not_write_into_the_page() -> None:
    from dataclasses import replace

    spec = replace(demo_spec(), name="<img src=x>")
    with serving(FakeCluster(), spec=spec) as server:
        assert "<img" not in get(server.url, **BROWSER).text


def test_it_says_when_nothing_can_be_answered(server: Server) -> None:
    for name in ("decode-0", "decode-1"):
        server.cluster[name].state = "draining"
    server.call(server.cluster.changed)
    answer = get(server.url)
    assert (answer.status_code, answer.json()["status"]) == (200, "unhealthy")
    assert "It can't answer now" in get(server.url, **BROWSER).text


@pytest.mark.parametrize("headers", [{}, BROWSER], ids=["program", "browser"])
def test_with_keys_a_stranger_is_told_neither_model_nor_tenant(headers: dict[str, str], tmp_path: Path) -> None:
    """With a key it is the same: what is served is asked of `/v1/models`."""
    secret = new_key(file := tmp_path / "keys.json", "acme")
    with serving(FakeCluster(), config=Config(security=SecurityConfig(keys_file=str(file)))) as server:
        for more in ({}, {"Authorization": f"Bearer {secret}"}, {"Authorization": "Bearer wrong"}):
            answer = get(server.url, **headers, **more)
            assert answer.status_code == 200
            names = [re.escape(name) for name in server.service.spec.names]
            assert not re.search(rf"\b({'|'.join(names)}|acme|decode-0|prefill-0)\b", answer.text)
        if not headers:
            assert get(server.url).json()["needs_key"] is True


def test_the_clients_port_names_no_operators_path_where_these_have_a_port_of_their_own(tmp_path: Path) -> None:
    new_key(file := tmp_path / "operators.json", "operator")
    config = Config(security=SecurityConfig(admin_port=1, admin_keys_file=str(file)))
    with serving(FakeCluster(), config=config) as server:
        told = get(server.url).json()
        assert not {one["path"] for one in told["endpoints"]} & OPERATORS
        assert not any(one["path"].startswith("/cluster") for one in told["endpoints"])
        assert "dashboard" not in told
        assert server.admin_url.rpartition(":")[2] not in get(server.url, **BROWSER).text
        theirs = get(server.admin_url).json()
        paths = {one["path"] for one in theirs["endpoints"]}
        assert {"/cluster/status", "/cluster/drain/{worker}", "/metrics"} <= paths
        assert {path for path in paths if path.startswith("/v1")} == SERVED_PATHS.keys()
        assert theirs["dashboard"] == "/dashboard"
