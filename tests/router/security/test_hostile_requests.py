"""Requests that try to be more than they are: headers with line breaks, names with paths, pages of other origins."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.router.fake_worker import FakeCluster
from tests.router.http_server import WAIT_S, Server, serving
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.security_config import SecurityConfig
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.key_file import check_tenant
from twinpool.router.api.http_exchange import ALLOWED_HEADERS
from twinpool.router.api.http_protocol import HEAD_BYTES

ASK = {"prompt": [5, 6, 7], "max_tokens": 4, "seed": 1}
ORIGIN = "https://chat.example.com"
PATHS = [
    "../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "/etc/passwd",
    "..\\x",
    "a\r\nb",
    "a\0b",
    "%00",
    "x" * 4000,
    "💥",
]


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(FakeCluster()) as found:
        yield found
        found.at_rest()


def raw(server: Server, said: bytes) -> bytes:
    """All that is answered to bytes as they are."""
    with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as plain:
        plain.sendall(said)
        heard = b""
        try:
            while part := plain.recv(65536):
                heard += part
        except ConnectionError:
            pass
        return heard


def heads(heard: bytes) -> list[bytes]:
    """The headers of all answers in these bytes."""
    return [part.split(b"\r\n\r\n")[0] for part in heard.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize(
    "value",
    [
        b"a\r\nset-cookie: x=1", b"a\nset-cookie: x=1", b"a\rset-cookie: x=1", b"a\0b", b"%0d%0aset-cookie:%20x=1",
        "a\u010d\u010aset-cookie: x".encode(),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", [b"x-request-id", b"origin", b"authorization"])
def test_no_header_of_a_request_becomes_one_of_the_answer(server: Server, name: bytes, value: bytes) -> None:
    heard = raw(server, b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + name + b": " + value + b"\r\n\r\n")
    for head in heads(heard):
        assert b"set-cookie" not in head.lower() or b"x-request-id: " in head
        assert not any(line.lower().startswith(b"set-cookie") for line in head.splitlines())
    server.complete(**ASK)


def test_a_request_id_comes_back_as_letters_and_little_else(server: Server) -> None:
    given = {"X-Request-Id": "a b<c>;\t=é/..\\%0d%0a" + "x" * 100}
    answered = server.client.get("/live", headers={k.encode(): v.encode("latin-1") for k, v in given.items()})
    assert answered.headers["x-request-id"] == "abc..0d0a" + "x" * 55


def test_headers_without_end_are_refused(server: Server) -> None:
    heard = raw(server, b"GET /live HTTP/1.1\r\nhost: x\r\nx: " + b"a" * (2 * HEAD_BYTES) + b"\r\n\r\n")
    assert heard.startswith(b"HTTP/1.1 431 ")
    many = b"".join(b"x-%d: y\r\n" % n for n in range(HEAD_BYTES // 4))
    assert raw(server, b"GET /live HTTP/1.1\r\nhost: x\r\n" + many + b"\r\n").startswith(b"HTTP/1.1 431 ")
    server.complete(**ASK)


@pytest.mark.parametrize(
    "said",
    [
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 60\r\n\r\nxxxxx",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        b"GET /live HTTP/9.9\r\nhost: x\r\n\r\n",
        b"GET \xff\xfe HTTP/1.1\r\n\r\n",
    ],
)
def test_two_lengths_of_one_body_are_refused(server: Server, said: bytes) -> None:
    """Else a proxy and the router would disagree on where the next request begins."""
    heard = raw(server, said)
    assert not heard.startswith(b"HTTP/1.1 200")
    assert heard.count(b"HTTP/1.1 ") <= 1
    server.complete(**ASK)


@pytest.mark.parametrize("name", PATHS)
def test_names_are_names_and_no_paths(server: Server, name: str) -> None:
    for path in ("/v1/models/", "/cluster/drain/", "/cluster/undrain/", "/cluster/role/"):
        method = "GET" if "models" in path else "POST"
        answer = server.client.request(method, path + quote(name, safe=""))
        assert answer.status_code in (404, 409, 503), answer.text
        assert "root:" not in answer.text
    refused = server.post("/v1/completions", {**ASK, "model": name})
    assert refused.status_code == 404
    assert "root:" not in refused.text
    for field in ("cache_salt", "user"):
        assert server.post("/v1/completions", {**ASK, field: name}).status_code in (200, 400)


@pytest.mark.parametrize("name", ["../x", "a/b", "a\nb", "", "a" * 65, "a b", "\u00e9"])
def test_a_tenants_name_is_no_path_and_no_line(name: str) -> None:
    with pytest.raises(ConfigError, match="a tenant's name has"):
        check_tenant(name)


# ---------------------------------------------------------------- browsers


def allowed(answer: httpx.Response) -> str | None:
    found: str | None = answer.headers.get("access-control-allow-origin")
    return found


@pytest.mark.parametrize("origin", [ORIGIN, "null", "https://evil.example.com"])
def test_no_origin_may_read_an_answer_unless_it_is_named(server: Server, origin: str) -> None:
    answer = server.post("/v1/completions", ASK, Origin=origin)
    assert (answer.status_code, allowed(answer)) == (200, None)
    asked = server.client.options("/v1/completions", headers={**PREFLIGHT, "Origin": origin})
    assert (asked.status_code, allowed(asked)) == (405, None)


PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


@pytest.mark.parametrize(
    ("origins", "origin", "passes"),
    [
        (f"https://other.example.com, {ORIGIN}", ORIGIN, True),
        (ORIGIN + "/", ORIGIN, True),
        (ORIGIN, ORIGIN + ".evil.example.com", False),
        (ORIGIN, "http://chat.example.com", False),
        ("*", "https://anything.example.com", True),
    ],
)
def test_an_origin_that_is_named_may(origins: str, origin: str, passes: bool) -> None:
    with serving(FakeCluster(), config=Config(security=SecurityConfig(cors_origins=origins))) as server:
        answer = server.post("/v1/completions", ASK, Origin=origin)
        assert (answer.status_code, allowed(answer)) == (200, origin if passes else None)
        asked = server.client.options("/v1/completions", headers={**PREFLIGHT, "Origin": origin})
        assert (asked.status_code, allowed(asked)) == ((204, origin) if passes else (405, None))
        assert allowed(server.client.get("/nowhere", headers={"Origin": origin})) == (origin if passes else None)
        assert allowed(server.post("/v1/completions", ASK)) is None
        assert "access-control-allow-credentials" not in asked.headers


OPENAI_JS = "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-retry-count,x-stainless-runtime"


@pytest.mark.parametrize(
    ("asked", "passes"),
    [(OPENAI_JS, True), ("X-Custom , other", True), ("a\x00b", False), ("a b", False), ("x-" + "a" * 3000, False)],
)
def test_a_page_may_send_the_headers_that_its_client_sends(asked: str, passes: bool) -> None:
    """OpenAI's package for JavaScript sends some ten of its own."""
    with serving(FakeCluster(), config=Config(security=SecurityConfig(cors_origins=ORIGIN))) as server:
        told = b"OPTIONS /v1/completions HTTP/1.1\r\nHost: a\r\nOrigin: %s\r\nAccess-Control-Request-Method: POST\r\n"
        raw = told % ORIGIN.encode() + b"Access-Control-Request-Headers: %s\r\n\r\n" % asked.encode()
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 60) as client:
            client.sendall(raw)
            head = client.recv(65536).decode("latin-1")
    if "\x00" in asked:
        assert head.startswith("HTTP/1.1 400")
        return
    names = next(line for line in head.split("\r\n") if line.startswith("access-control-allow-headers: "))
    assert names.partition(": ")[2] == (asked if passes else ALLOWED_HEADERS.decode())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/tokenize"])
def test_a_compressed_body_is_refused_unread(server: Server, path: str) -> None:
    body = gzip.compress(json.dumps(ASK).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = server.client.post(path, content=body, headers=headers)
    assert answer.status_code == 415
    assert "without Content-Encoding" in answer.text
    assert server.post("/v1/completions", ASK, **{"Content-Encoding": "identity"}).status_code == 200


# ---------------------------------------------------------------- what is logged


@pytest.mark.parametrize("asked", [False, True])
def test_prompts_are_logged_only_where_the_operator_asks_for_it(caplog: pytest.LogCaptureFixture, asked: bool) -> None:
    config = Config(security=SecurityConfig(log_prompts=asked))
    body: dict[str, Any] = {**ASK, "prompt": [7, 77, 777, 7]}
    with caplog.at_level("DEBUG"), serving(FakeCluster(), config=config) as server:
        server.complete(**body)
        server.refused("/v1/completions", {**body, "n": "[7, 77, 777, 7]"})
        server.at_rest()
    written = [json.dumps(record.__dict__, default=str) for record in caplog.records]
    assert any("[7, 77, 777, 7]" in line for line in written) is asked


def test_files_of_keys_and_certificates_are_no_answers(server: Server, tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text("{}")
    for path in (f"/{tmp_path}/keys.json", "/../keys.json", "//etc/passwd", "/.router-config.json"):
        assert server.client.get(path).status_code == 404
