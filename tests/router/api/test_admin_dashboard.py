"""The dashboard over HTTP: who may load the page, who may see numbers, and what the page can't be made to do."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.router.fake_worker import FakeCluster
from tests.router.http_server import Server, serving
from tests.router.service.fake_dashboard import FakeDashboard
from tests.support.served_cluster import ROOT
from twinpool.cli.credential_commands import new_key
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.security_config import SecurityConfig
from twinpool.router.api.admin_status import FOLDER, KINDS, TOKEN_VARIABLE, page_files
from twinpool.router.service.controller_calls import MAX_VIEWERS

EVENTS = "/cluster/dashboard"


@pytest.fixture(scope="module")
def shown() -> Iterator[Server]:
    with serving(FakeCluster(), dashboard=FakeDashboard()) as server:
        yield server


def events(client: httpx.Client, **headers: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    with client.stream("GET", EVENTS, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        kind = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                kind = line[7:]
            elif line.startswith("data: "):
                found.append((kind, line[6:]))
                if len(found) == 2:
                    break
    return found


def status(client: httpx.Client, **headers: str) -> int:
    """The status of an answer whose body, which may never end, isn't read."""
    with client.stream("GET", EVENTS, headers=headers) as answer:
        return answer.status_code


def test_the_whole_page_is_small_and_loads_nothing_from_elsewhere() -> None:
    files = page_files()
    assert sum(len(body) for _, body in files.values()) < 200_000
    assert {path for path in files if path.endswith(".html")} == set()
    kinds = {file.suffix for file in FOLDER.iterdir() if file.is_file()}
    assert kinds - {".py"} == set(KINDS), "what nobody is shown"
    assert not [path for path in files if path.endswith(".py")]
    for path, (_, body) in files.items():
        text = body.decode()
        outside = text.replace("http://www.w3.org/2000/svg", "")
        assert not [mark for mark in ("http:", "https:", '"//') if mark in outside], path


@pytest.mark.parametrize("path", sorted(page_files()))
def test_anybody_may_load_the_page_which_runs_no_script_but_its_own(shown: Server, path: str) -> None:
    answer = shown.client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == page_files()[path][0].decode()
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_there_is_no_way_out_of_the_pages_folder(shown: Server) -> None:
    for path in ("/dashboard/../app.py", "/dashboard/%2e%2e/app.py", "/dashboard/", "/dashboard/index.html"):
        assert shown.client.get(path).status_code == 404


def test_events_begin_with_the_past_and_go_on_with_frames(shown: Server) -> None:
    (first, past), (second, frame) = events(shown.client)
    assert (first, second) == ("past", "frame")
    assert json.loads(past) == {"v": 1}
    assert json.loads(frame)["v"] == 1


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://elsewhere.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Host": "attacker.example"},
        {"X-Forwarded-For": "10.0.0.1"},
    ],
)
def test_no_other_sites_page_gets_events_or_a_viewers_place(shown: Server, headers: dict[str, str]) -> None:
    assert status(shown.client, **headers) == 403
    assert events(shown.client, **{"Sec-Fetch-Site": "same-origin"})


def test_where_there_is_a_token_events_need_it_and_the_page_does_not(
    shown: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    assert status(shown.client) == 403
    assert status(shown.client, Authorization="Bearer wrong") == 403
    assert shown.client.get("/dashboard").status_code == 200
    assert events(shown.client, Authorization="Bearer secret")


def test_with_a_port_of_their_own_operators_have_the_page_there_alone(tmp_path: Path) -> None:
    file = tmp_path / "operators.json"
    secret = new_key(file, "operator")
    config = Config(security=SecurityConfig(admin_port=1, admin_keys_file=str(file)))
    with (
        serving(FakeCluster(), config=config, dashboard=FakeDashboard()) as server,
        httpx.Client(base_url=server.admin_url, timeout=60, trust_env=False) as operator,
    ):
        assert server.client.get("/dashboard").status_code == 404
        assert status(server.client) == 404
        assert operator.get("/dashboard").status_code == 200
        assert operator.get("/dashboard/app.js").status_code == 200
        assert status(operator) == 403
        assert events(operator, Authorization=f"Bearer {secret}")


def test_a_router_that_has_no_dashboard_says_so() -> None:
    with serving(FakeCluster()) as server:
        answer = server.client.get(EVENTS)
        assert answer.status_code == 409
        assert "no dashboard" in answer.json()["error"]["message"]


def test_no_more_look_than_may_and_one_who_leaves_makes_room(shown: Server) -> None:
    relay = shown.service.controller.dashboard
    assert relay is not None
    held = [shown.call(relay.open) for _ in range(MAX_VIEWERS)]
    answer = shown.client.get(EVENTS)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "10"
    for viewer in held[1:]:
        shown.call(viewer.close)
    assert events(shown.client)
    shown.call(held[0].close)
    shown.wait_until(lambda: not relay.viewers)


def test_what_the_page_of_docs_types_shows_events(shown: Server) -> None:
    page = (ROOT / "docs" / "dashboard.md").read_text()
    (code,) = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    code = code.replace("http://127.0.0.1:8000", shown.url)
    done = subprocess.run(["bash", "-euc", code], capture_output=True, text=True, timeout=60, check=True)
    kinds = [line for line in done.stdout.splitlines() if line.startswith("event: ")]
    assert kinds[:2] == ["event: past", "event: frame"]
    assert len(kinds) > 5


def test_a_client_that_leaves_is_a_viewer_no_more(shown: Server) -> None:
    relay = shown.service.controller.dashboard
    assert relay is not None
    with shown.client.stream("GET", EVENTS) as answer:
        lines = answer.iter_lines()
        next(lines)
        shown.wait_until(lambda: relay.viewers == 1)
    shown.wait_until(lambda: relay.viewers == 0)
