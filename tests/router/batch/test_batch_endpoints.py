"""Endpoints of files and batches: forms beside another reader of them, lists in pages, expiry, and what is refused."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any

import httpx
import pytest

from tests.router.batch.test_batches import URL, client_of, ended, line, quickly, router, submit
from tests.router.http_server import Server
from twinpool.contracts.errors import RequestError
from twinpool.router.api import batch_endpoints
from twinpool.router.api.batch_endpoints import FIELD_BYTES, FormReader

__all__ = ["quickly"]


def read_form(body: bytes, boundary: str, draw: random.Random) -> tuple[dict[str, str], str | None, bytes, bool]:
    """What the reader makes of a form in pieces: fields, the file's name and content, and whether it has ended."""
    form, content, at = FormReader(f"--{boundary}".encode()), b"", 0
    while at < len(body):
        size = draw.choice([1, 2, 3, 5, 17, 200])
        content += b"".join(form.feed(body[at : at + size]))
        at += size
    return form.fields, form.filename, content, form.ended


def expected_form(body: bytes, boundary: str) -> tuple[dict[str, str], str | None, bytes, bool]:
    """The same, by Python's reader of mail."""
    mail = BytesParser(policy=HTTP).parsebytes(b"Content-Type: multipart/form-data; boundary=" + boundary.encode()
                                               + b"\r\n\r\n" + body)  # fmt: skip
    fields, filename, content = dict[str, str](), None, b""
    for part in mail.iter_parts():
        raw = part.get_payload(decode=True)
        assert isinstance(raw, bytes)
        if part.get_param("name", header="content-disposition") == "file":
            filename, content = part.get_filename(), raw
        else:
            fields[str(part.get_param("name", header="content-disposition"))] = raw.decode()
    return fields, filename, content, True


@pytest.mark.parametrize("seed", range(40))
def test_forms_are_read_as_another_reader_does_in_whatever_pieces_they_come(seed: int) -> None:
    draw = random.Random(seed)
    pieces = [b"--b", b"\r\n--b", b"\r\n--bx", b"\r\n--b-", b"\r\n--b x", b"\r\n", b"x", b"-", b"--b--", b"\r\n--bb--"]

    def text() -> bytes:
        return b"".join(draw.choices(pieces, k=draw.randint(0, 6)))

    content = text()
    if content.startswith(b"--b"):
        content = b"y" + content
    content = content.replace(b"\r\n--b\r\n", b"").replace(b"\r\n--b--", b"")
    while b"\r\n--b\r\n" in content or b"\r\n--b--" in content:
        content = content.replace(b"\r\n--b\r\n", b"").replace(b"\r\n--b--", b"")
    content = content.removesuffix(b"\r\n--b")
    parts = [
        b'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + content,
        b'Content-Disposition: form-data; name="purpose"\r\nX: y\r\n\r\nbatch',
        b'Content-Disposition: form-data; name="empty"\r\n\r\n',
    ]
    draw.shuffle(parts)
    pad = draw.choice([b"", b" ", b" \t"])
    body = draw.choice([b"", b"a preamble\r\n"])
    body += (
        b"".join(b"--b" + pad + b"\r\n" + part + b"\r\n" for part in parts) + b"--b--" + draw.choice([b"", b"\r\nx"])
    )
    assert read_form(body, "b", draw) == expected_form(body, "b")


def test_a_boundary_within_a_longer_line_is_content() -> None:
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    for content in (b"a\r\n--bx\r\nb", b"\r\n--b\r", b"a\r\n--b-\r\n", b"a\r\n--b -"):
        body = head + content + b"\r\n--b--"
        for seed in range(8):
            assert read_form(body, "b", random.Random(seed))[2:] == (content, True), content


def test_a_field_is_bounded_by_all_its_pieces() -> None:
    form = FormReader(b"--b")
    form.feed(b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n')
    for _ in range(FIELD_BYTES):
        form.feed(b"x")
    with pytest.raises(RequestError, match="too long"):
        [form.feed(b"x") for _ in range(20)]  # What may begin a boundary is held back.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with router(tmp_path_factory.mktemp("batches"), batch={"keep_s": 100_000}) as made:
        yield made


def upload(server: Server, content: bytes = b"{}", fields: dict[str, str] | None = None) -> httpx.Response:
    files = {"file": ("f", content)}
    return server.client.post("/v1/files", files=files, data={"purpose": "batch", **(fields or {})})


def names(server: Server, path: str, query: str = "") -> tuple[list[str], bool]:
    page = server.client.get(f"{path}?{query}").json()
    found = [one["id"] for one in page["data"]]
    assert (page["first_id"], page["last_id"]) == ((found[0], found[-1]) if found else (None, None))
    return found, page["has_more"]


def test_lists_come_in_pages_in_either_order_and_by_purpose(server: Server) -> None:
    for _ in range(5):
        assert upload(server).status_code == 200
    everything, more = names(server, "/v1/files")
    assert (len(everything) >= 5, more) == (True, False)
    assert names(server, "/v1/files", "order=asc") == (everything[::-1], False)
    assert names(server, "/v1/files", "purpose=fine-tune") == ([], False)
    for size in (1, 2, 3, len(everything) - 1, len(everything), len(everything) + 1):
        paged, after, more = list[str](), "", True
        while more:
            found, more = names(server, "/v1/files", f"limit={size}{after}")
            assert 0 < len(found) <= size
            paged += found
            assert len(paged) <= len(everything)
            after = f"&after={found[-1]}"
        assert paged == everything, size


@pytest.mark.parametrize(
    ("seconds", "anchor", "status"),
    [
        ("3600", "created_at", 200),
        ("3599", "created_at", 400),
        ("100000", "created_at", 200),
        ("100001", "created_at", 400),
        ("3600", "now", 400),
        ("-1", "created_at", 400),
        ("", "created_at", 400),
    ],
)
def test_a_file_expires_when_its_client_says_within_bounds(
    server: Server, seconds: str, anchor: str, status: int
) -> None:
    answer = upload(server, fields={"expires_after[anchor]": anchor, "expires_after[seconds]": seconds})
    assert answer.status_code == status, answer.text
    if status == 200:
        stored = answer.json()
        assert stored["expires_at"] - stored["created_at"] == int(seconds)
        assert server.client.get(f"/v1/files/{stored['id']}").json() == stored
    else:
        assert answer.json()["error"]["param"] == "expires_after"


def test_a_files_content_can_be_got_often_and_not_deleted(server: Server) -> None:
    name = upload(server, b"x" * 100_000).json()["id"]
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(12):
        assert len(server.client.get(f"/v1/files/{name}/content").content) == 100_000
    assert len(os.listdir("/proc/self/fd")) <= before + 4, "each is closed"
    assert server.client.delete(f"/v1/files/{name}/content").status_code == 404
    assert server.client.get(f"/v1/files/{name}").status_code == 200
    assert server.client.delete(f"/v1/files/{name}").json() == {"id": name, "object": "file", "deleted": True}
    assert server.client.get(f"/v1/files/{name}/content").status_code == 404


def test_an_output_is_no_input_and_a_batch_is_not_changed_by_other_posts(server: Server) -> None:
    client = client_of(server)
    batch = ended(client, submit(client, [line(1)]).id)
    body: dict[str, Any] = {"input_file_id": batch.output_file_id, "endpoint": URL, "completion_window": "24h"}
    assert server.refused("/v1/batches", body)["param"] == "input_file_id"
    for path in (f"/v1/batches/{batch.id}", f"/v1/batches/{batch.id}/retry"):
        assert server.client.post(path, json={}).status_code == 404
    assert server.client.get(f"/v1/batches/{batch.id}/cancel").status_code in (404, 405)


def test_a_refused_upload_answers_before_its_body_is_through_and_leaves_the_next_one_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_endpoints, "MAX_UPLOADS", 0)

    def pieces() -> Iterator[bytes]:
        for _ in range(40):
            yield b"x" * 65_536

    headers = {"content-type": "multipart/form-data; boundary=b"}
    answer = server.client.post("/v1/files", content=pieces(), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "busy")
    assert answer.headers["connection"] == "close"
    monkeypatch.undo()
    assert upload(server).status_code == 200


def test_a_tenant_has_half_of_the_uploads_at_once() -> None:
    for others, mine, refused in ((0, 3, False), (0, 4, True), (4, 3, False), (5, 3, True), (8, 0, True)):
        found = batch_endpoints.too_many_uploads(["other"] * others + ["mine"] * mine, "mine")
        assert found == refused, (others, mine)
