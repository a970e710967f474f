"""A cluster that protects every socket, made by the commands that docs/operating/secure.md shows, used over them."""

from __future__ import annotations

import random
import re
import shlex
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import DefaultHttpxClient, OpenAI

from tests.support.free_ports import free_port
from tests.support.served_cluster import COMMAND, ROOT, Access, Serving, environment, serving, until

PROMPT = "It was a fine morning, and"
SECRET_PROMPT = "The password of the old lighthouse is seven herons"


@dataclass(frozen=True)
class Secured:
    """A running cluster with every kind of protection, and the folder of its files."""

    cluster: Serving
    folder: Path
    admin: str
    """The operators' URL."""
    plain: str
    """The answer of a cluster without protection."""


def shown() -> list[list[str]]:
    """The commands of the page's section on certificates."""
    section = (ROOT / "docs" / "operating" / "secure.md").read_text().split("\n## Certificates\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^```console\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for line in "".join(blocks).splitlines()]


def run(folder: Path, words: list[str]) -> str:
    done = subprocess.run(
        [*COMMAND, *words], cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    with serving("demo", tmp_path_factory.mktemp("plain"), sections={"transfer": {"plane": "local"}}) as plain:
        expected = plain.complete(PROMPT, max_tokens=24).text
    access, port = Access(folder / "certs" / "ca.pem"), free_port()
    for program, *words in shown():
        assert program == "twinpool"
        if words[0] == "serve":
            flags = [str(ROOT / part) if part.startswith("configs/") else part for part in words[1:]]
            break
        said = run(folder, words)
        if words[:2] == ["keys", "new"]:
            own = "operators.json" not in words
            access = replace(access, key=said) if own else replace(access, admin_key=said)
    sections = {"security": {"admin_port": port}, "cache": {"events.endpoint": "tcp://127.0.0.1:0"}}
    with serving("demo", folder, *flags, "--decode", "2", sections=sections, access=access) as cluster:
        yield Secured(cluster, folder, f"https://127.0.0.1:{port}", expected)


@pytest.mark.slow
def test_the_openai_package_is_answered_over_https_as_without_protection(secured: Secured) -> None:
    access = secured.cluster.access
    assert secured.cluster.url.startswith("https://")
    web = DefaultHttpxClient(verify=ssl.create_default_context(cafile=access.ca))
    with OpenAI(base_url=f"{secured.cluster.url}/v1", api_key=access.key, http_client=web, max_retries=0) as client:
        answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=24, temperature=0)
        assert answer.choices[0].text == secured.plain
        streamed = client.completions.create(model="demo", prompt=PROMPT, max_tokens=24, temperature=0, stream=True)
        assert "".join(part.choices[0].text for part in streamed) == secured.plain


@pytest.mark.slow
def test_the_operators_port_takes_operators_keys_and_the_endpoint_has_none_of_its_paths(secured: Secured) -> None:
    ca, key, admin_key = (secured.cluster.access.ca, secured.cluster.access.key, secured.cluster.access.admin_key)
    with httpx.Client(verify=ssl.create_default_context(cafile=ca), timeout=60) as web:

        def status(url: str, secret: str) -> int:
            return web.get(url, headers={"Authorization": f"Bearer {secret}"} if secret else {}).status_code

        for path in ("/cluster/status", "/metrics", "/load"):
            assert status(secured.admin + path, admin_key) == 200
            assert status(secured.admin + path, key) == 403
            assert status(secured.admin + path, "") == 403
            assert status(secured.cluster.url + path, admin_key) == 404
        assert status(f"{secured.admin}/v1/models", admin_key) == 404
        assert status(f"{secured.cluster.url}/v1/models", admin_key) == 401


@pytest.mark.slow
def test_a_drain_goes_over_the_operators_port(secured: Secured) -> None:
    done = secured.cluster.twinpool("drain", "decode-1")
    assert done.returncode == 0, done.stderr
    assert "decode-1 has left" in done.stdout
    assert secured.cluster.complete(PROMPT, max_tokens=24).text == secured.plain
    assert secured.cluster.twinpool("undrain", "decode-1").returncode == 0
    without = subprocess.run(
        [*COMMAND, "status"], cwd=secured.folder, env=environment(secured.folder), capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert without.returncode == 1
    assert "an operator's key" in without.stderr


@pytest.mark.slow
def test_a_tenant_finds_nothing_of_what_another_has_cached(secured: Secured) -> None:
    """Not one token is reused: a foreign tenant's prompt costs what one costs that nobody has asked."""
    cluster, rng = secured.cluster, random.Random(49)
    cached, fresh = ([rng.randrange(200, 1000) for _ in range(400)] for _ in range(2))
    other = run(secured.folder, ["keys", "new", "rival", "--file", "keys.json"])
    web = cluster.access.web() | {"headers": {"Authorization": f"Bearer {other}"}}
    web["timeout"] = 60
    until(lambda: httpx.get(f"{cluster.url}/v1/models", **web).status_code == 200, "the router to read the new key")

    def reused(prompt: list[int], **access: Any) -> int:
        body = {"model": "demo", "prompt": prompt, "max_tokens": 1}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, **access)
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert reused(cached, **cluster.access.web()) == 0
    until(lambda: reused(cached, **cluster.access.web()) > 300, "the first tenant to find its own prompt")
    assert reused(cached, **web) == reused(fresh, **web) == 0
    until(lambda: reused(cached, **web) > 300, "the other tenant to find its own")


@pytest.mark.slow
def test_no_log_holds_a_prompt_or_a_key(secured: Secured) -> None:
    cluster = secured.cluster
    cluster.complete(SECRET_PROMPT, max_tokens=4)
    refused = httpx.post(
        f"{cluster.url}/v1/completions", json={"prompt": SECRET_PROMPT, "n": SECRET_PROMPT}, timeout=60,
        **cluster.access.web(),
    )  # fmt: skip
    assert refused.status_code == 400
    (logs,) = [line.split("logs", 1)[1].strip() for line in cluster.lines if "  logs  " in line]
    texts = {path.name: path.read_text(errors="replace") for path in Path(logs).iterdir() if path.is_file()}
    assert "router.log" in texts
    for name, text in texts.items():
        assert "lighthouse" not in text, name
        for secret in (cluster.access.key, cluster.access.admin_key):
            assert secret not in text, name
