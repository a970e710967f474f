"""OpenAI's client for JavaScript in a page of a real browser, another origin than the endpoint, which is behind nginx.

The client and what bundles it are fetched by npm into build/browser-client, once.
"""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

from tests.soak.client_scripts import IN_A_BROWSER
from tests.soak.proxies import Proxy, proxy
from tests.support.browser import Tab, browsing, chromium
from tests.support.served_cluster import ROOT, Serving, serving, until

pytestmark = [
    pytest.mark.soak,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(chromium() is None, reason="no Chromium"),
    pytest.mark.skipif(shutil.which("npm") is None, reason="no npm"),
]
FOLDER = ROOT / "build" / "browser-client"
PACKAGES = ("openai@7.59.0", "zod@4.6.7", "esbuild@0.28.2")
INSTALL_S = 600
PAGE = '<!doctype html><meta charset="utf-8"><title>A page</title><script type="module" src="bundle.js"></script>'


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page and its script."""
    ready = FOLDER / "ready"
    if not ready.is_file() or ready.read_text() != " ".join(PACKAGES):
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir(parents=True)
        (FOLDER / "package.json").write_text('{"private": true}')
        install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", *PACKAGES]
        done = subprocess.run(install, cwd=FOLDER, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        if done.returncode:
            pytest.skip(f"npm can't fetch {' '.join(PACKAGES)}: {done.stderr.strip().splitlines()[-1]}")
        ready.write_text(" ".join(PACKAGES))
    folder = tmp_path_factory.mktemp("site")
    (folder / "index.html").write_text(PAGE)
    bundle = [
        str(FOLDER / "node_modules" / ".bin" / "esbuild"), "--bundle", "--format=esm", "--platform=browser",
        f"--outfile={folder / 'bundle.js'}",
    ]  # fmt: skip
    done = subprocess.run(
        bundle, cwd=FOLDER, input=IN_A_BROWSER, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The origin of a plain server of a folder's files."""
    handler = functools.partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Page:
    """The page, its client, and the cluster that it asks."""

    def __init__(self, tab: Tab, cluster: Serving, through: Proxy) -> None:
        self.tab, self.cluster, self.proxy = tab, cluster, through

    def run(self, call: str) -> Any:
        return self.tab.run(f"openai.{call}")


@pytest.fixture(scope="module")
def page(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    run = tmp_path_factory.mktemp("run")
    with served(site) as origin, serving("demo", run, sections={"security": {"cors_origins": origin}}) as cluster:
        port = urlparse(cluster.url).port
        assert port is not None
        with proxy("nginx", run / "nginx", [port]) as through, browsing() as browser:
            tab = browser.tab()
            tab.go(f"{origin}/index.html")
            tab.until("'client' in window")
            assert tab.run(f"client({json.dumps(through.url)})")
            yield Page(tab, cluster, through)
            assert {urlparse(url).netloc for url in tab.requests} == {
                urlparse(origin).netloc,
                urlparse(through.url).netloc,
            }
        cluster.settle()


def test_a_chat_comes_whole_and_streamed(page: Page) -> None:
    whole, streamed = page.run("whole()"), page.run("streamed()")
    assert whole["text"]
    assert (streamed["text"], streamed["usage"]) == (whole["text"], whole["usage"])
    assert streamed["events"] > 5
    assert whole["request"], "a page may read the request's id"


@pytest.mark.parametrize("named", [True, False])
def test_tools_are_called(page: Page, named: bool) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}} if named else "required"
    whole, streamed = page.run(f"tools({json.dumps(choice)})")
    assert whole == streamed
    finish, ((name, arguments),) = whole
    assert (finish, name) == ("stop" if named else "tool_calls", "get_weather")
    assert json.loads(arguments)["town"] in ("Rome", "Oslo")


def test_structured_output_is_parsed(page: Page) -> None:
    person = page.run("structured()")
    assert person["name"] in ("Ada", "Alan")
    assert person["age"] == 20


def test_errors_are_the_clients_own(page: Page) -> None:
    wrong = page.run("error({temperature: 200})")
    assert wrong.pop("request")
    assert wrong == {
        "name": "BadRequestError", "of": True, "status": 400, "code": None, "param": "temperature",
        "type": "invalid_request_error", "message": "400 temperature must be a number from 0 to 100; got 200",
    }  # fmt: skip
    missing = page.run("error({model: 'other'})")
    assert (missing["name"], missing["status"], missing["code"]) == ("NotFoundError", 404, "model_not_found")


def test_an_abort_in_the_page_cancels_the_request(page: Page) -> None:
    before = page.cluster.metric("twinpool_client_disconnects_total")
    assert page.run("aborted()") == 3

    def cancelled() -> bool:
        return page.cluster.metric("twinpool_client_disconnects_total") == before + 1

    until(cancelled, "the router to hear of it")
    page.cluster.settle()


def test_a_response_comes_whole_and_streamed(page: Page) -> None:
    told = page.run("response()")
    assert told["whole"]
    assert told["text"] == told["whole"]
    assert (told["first"], told["last"]) == ("response.created", f"response.{told['status']}")


def test_nothing_was_complained_of_but_the_errors_that_were_asked_for(page: Page) -> None:
    assert [text for text in page.tab.complaints if "status of 400" not in text and "status of 404" not in text] == []
