"""Files and batches through a router: the `openai` package unchanged, tenants, hostile uploads, kills, live traffic."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types import Batch

from tests.router.fake_worker import FakeCluster, expected
from tests.router.grpc_fakes import grpc_cluster
from tests.router.http_server import WAIT_S, Server, serving
from tests.router.test_router_process import ENVIRONMENT, ROOT, command, read_line
from twinpool.cli import command_line
from twinpool.cli import commands as cli
from twinpool.cli.load import batch_command
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.key_file import ApiKey, KeyFile, digest_of, write_key_file
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.router.batch import batch_runner
from twinpool.router.batch.batch_store import BatchPlace, BatchStore, StorageFull, StoredBatch
from twinpool.router.service.admission import IdleCapacity

URL: Literal["/v1/completions"] = "/v1/completions"
QUICK = {"sync_s": 0.01}
NO_OTHERS: Mapping[str, FakeCluster] = MappingProxyType({})


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "POLL_S", 0.02)
    monkeypatch.setattr(batch_runner, "LOOK_S", 0.005)
    monkeypatch.setattr(batch_runner, "BACKOFF_S", (0.01, 0.05))


@contextmanager
def router(
    folder: Path, cluster: FakeCluster | None = None, others: Mapping[str, FakeCluster] = NO_OTHERS, **sections: Any
) -> Iterator[Server]:
    batch = {"folder": str(folder), **QUICK, **sections.pop("batch", {})}
    config = config_from_dict({"batch": batch, **sections})
    with serving(cluster or FakeCluster(1, 1), config=config, others=others) as server:
        yield server
        server.at_rest()


def client_of(server: Server, key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def line(number: int, **body: Any) -> dict[str, Any]:
    body = {"prompt": [5, 6, 300 + number], "max_tokens": 4, "seed": number} | body
    return {"custom_id": f"line-{number}", "method": "POST", "url": URL, "body": body}


def submit(client: OpenAI, lines: list[dict[str, Any]], window: Any = "24h") -> Batch:
    content = b"".join(json.dumps(one).encode() + b"\n" for one in lines)
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=URL, completion_window=window, metadata={"k": "v"})


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, "it never is so"


def ended(client: OpenAI, batch_id: str) -> Batch:
    found: list[Batch] = []

    def over() -> bool:
        found[:] = [client.batches.retrieve(batch_id)]
        return found[0].status in ("completed", "failed", "expired", "cancelled")

    until(over)
    return found[0]


def lines_of(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [json.loads(one) for one in client.files.content(file_id).text.splitlines()] if file_id else []


def answer(server: Server, number: int) -> str:
    tokens = expected([5, 6, 300 + number], SamplingParams(4, seed=number))
    return server.service.model_tokenizer.decode(tokens)


def test_a_batch_of_the_openai_package_is_answered_line_by_line_and_a_bad_line_is_an_error_line(tmp_path: Path) -> None:
    with router(tmp_path) as server:
        client = client_of(server)
        lines = [line(number) for number in range(30)]
        lines[3]["body"]["max_tokens"] = -1
        lines[4]["url"], lines[5]["method"], lines[6]["body"] = "/v1/embeddings", "GET", [1]
        del lines[7]["body"]
        lines[8]["body"]["stream"] = True
        lines[9]["body"]["model"] = "another"
        batch = submit(client, lines)
        assert (batch.status, batch.metadata, batch.endpoint) == ("validating", {"k": "v"}, URL)
        batch = ended(client, batch.id)
        assert batch.status == "completed"
        assert batch.request_counts is not None
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (30, 23, 7)
        good, bad = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
        assert {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in good} == {
            f"line-{number}": answer(server, number) for number in range(30) if number not in range(3, 10)
        }
        assert {one["custom_id"]: one["response"]["status_code"] for one in bad} == {
            f"line-{number}": 404 if number == 9 else 400 for number in range(3, 10)
        }
        assert all(one["response"]["body"]["error"]["message"] for one in bad)
        names = [one.id for one in client.files.list(purpose="batch_output")]
        assert set(names) == {batch.output_file_id, batch.error_file_id}
        assert [one.id for one in client.batches.list(limit=1)] == [batch.id]
        assert client.files.delete(batch.input_file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(batch.input_file_id)
        assert 'twinpool_batch_lines_total{result="failed"} 7.0' in server.client.get("/metrics").text


def keys_file(path: Path, **models: list[str]) -> dict[str, str]:
    """Write keys of these tenants, who may use these models; returns the section."""
    keys = [{"id": who, "tenant": who, "sha256": digest_of(f"tp-{who}")} for who in models]
    path.write_text(json.dumps({"tenants": {who: {"models": may} for who, may in models.items()}, "keys": keys}))
    return {"keys_file": str(path)}


def test_each_line_is_answered_by_the_model_that_it_names_and_waits_for_that_one_alone(tmp_path: Path) -> None:
    other, security = FakeCluster(1, 1), keys_file(tmp_path / "keys.json", all=["demo", "other"], one=["other"])
    with router(tmp_path / "batches", others={"other": other}, security=security) as server:
        core = server.others["other"].core
        server.wait_until(lambda: all(core.serving(role) for role in core.workers.roles))
        models = dict(enumerate(["demo", "other"] * 6 + ["neither"]))
        lines = [line(number, model=model) for number, model in models.items()] + [line(13), line(14)]
        lines[14]["body"] = [1]
        server.call(other["decode-0"].pause)
        headers = {"authorization": "Bearer tp-all"}
        with httpx.Client(base_url=server.url, headers=headers, timeout=WAIT_S, trust_env=False) as live:
            asked = live.build_request("POST", URL, json=line(99, model="other", stream=True)["body"])
            stream = live.send(asked, stream=True)
            server.wait_until(lambda: core.requests.in_flight == 1)
            batch = submit(client_of(server, "tp-all"), lines)
            log = 'twinpool_batch_lines_total{result="completed"} 6.0'
            until(lambda: log in server.client.get("/metrics").text)
            assert core.requests.in_flight == 1, "lines of the model that is busy wait, those of the other don't"
            server.call(other["decode-0"].resume)
            stream.read()
            stream.close()
        client = client_of(server, "tp-all")
        batch = ended(client, batch.id)
        good, bad = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
        told = {one["custom_id"]: one["response"]["body"] for one in good}
        assert {name: (body["model"], body["choices"][0]["text"]) for name, body in told.items()} == {
            f"line-{number}": (models[number], answer(server, number)) for number in range(12)
        }
        assert sum(len(worker.submits) for worker in other.workers.values()) == 2 * (6 + 1)
        errors = {one["custom_id"]: one["response"] for one in bad}
        assert {name: one["status_code"] for name, one in errors.items()} == {
            "line-12": 404, "line-13": 400, "line-14": 400,
        }  # fmt: skip
        assert "'demo', 'other'" in errors["line-12"]["body"]["error"]["message"]
        few = client_of(server, "tp-one")
        batch = ended(few, submit(few, [line(number, model=models[number]) for number in range(2)]).id)
        (refused,) = lines_of(few, batch.error_file_id)
        assert (refused["custom_id"], refused["response"]["status_code"]) == ("line-0", 403)
        assert [one["custom_id"] for one in lines_of(few, batch.output_file_id)] == ["line-1"]
        server.wait_until(lambda: not other.leftovers())


def test_what_is_no_batch_fails_and_says_where(tmp_path: Path) -> None:
    with router(tmp_path) as server:
        client = client_of(server)
        batch = ended(client, submit(client, [line(0), line(1), line(0)]).id)
        assert batch.status == "failed"
        assert batch.errors is not None
        assert [(one.code, one.line) for one in batch.errors.data or []] == [("duplicate_custom_id", 3)]
        assert batch.output_file_id is None
        for wrong in (
            {"endpoint": "/v1/models"},
            {"completion_window": "soon"},
            {"input_file_id": "file-x"},
            {"metadata": {"a": 1}},
        ):
            body = {"input_file_id": batch.input_file_id, "endpoint": URL, "completion_window": "24h"} | wrong
            assert server.refused("/v1/batches", body)["param"] == next(iter(wrong))


def test_a_cancelled_batch_has_what_was_answered_and_asks_nothing_more(tmp_path: Path) -> None:
    with router(tmp_path, batch={"concurrency": 2}) as server:
        client = client_of(server)
        server.pause("decode")
        batch = submit(client, [line(number) for number in range(8)])
        server.wait_until(lambda: server.service.core.requests.in_flight == 2)
        assert client.batches.cancel(batch.id).status == "cancelling"
        batch = ended(client, batch.id)
        assert batch.status == "cancelled"
        assert batch.cancelled_at is not None
        assert lines_of(client, batch.output_file_id) == []
        server.resume()
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(batch.id)


def test_an_expired_batch_says_so_in_a_line_for_each_request_without_an_answer(tmp_path: Path) -> None:
    with router(tmp_path, batch={"concurrency": 2}) as server:
        client = client_of(server)
        server.pause("decode")
        batch = submit(client, [line(number) for number in range(5)], "1m")
        server.wait_until(lambda: server.service.core.requests.in_flight == 2)
        (path,) = tmp_path.glob("tenants/*/batches/*.json")

        def later() -> None:
            runner_of(server).now = lambda: time.time() + 61

        server.call(later)
        batch = ended(client, batch.id)
        server.resume()
        assert batch.status == "expired"
        found = lines_of(client, batch.error_file_id)
        assert sorted(one["custom_id"] for one in found) == [f"line-{number}" for number in range(5)]
        assert {one["error"]["code"] for one in found} == {"batch_expired"}
        assert path.exists()


def runner_of(server: Server) -> batch_runner.BatchRunner:
    owners = [getattr(source, "__self__", None) for source in server.service.metrics.of_process]
    (found,) = [owner for owner in owners if isinstance(owner, batch_runner.BatchRunner)]
    return found


def test_a_key_never_sees_what_another_has(tmp_path: Path) -> None:
    keys = KeyFile(tuple(ApiKey(who, who, digest_of(f"tp-{who}")) for who in ("one", "two")))
    write_key_file(tmp_path / "keys.json", keys)
    with router(tmp_path / "batches", security={"keys_file": str(tmp_path / "keys.json")}) as server:
        mine, other = client_of(server, "tp-one"), client_of(server, "tp-two")
        batch = ended(mine, submit(mine, [line(number) for number in range(4)]).id)
        assert len(lines_of(mine, batch.output_file_id)) == 4
        assert not list(other.files.list())
        assert not list(other.batches.list())
        for name in (batch.input_file_id, batch.output_file_id):
            assert name is not None
            for ask in (other.files.retrieve, other.files.content, other.files.delete):
                with pytest.raises(openai.NotFoundError):
                    ask(name)
        for look in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                look(batch.id)
        with pytest.raises(openai.BadRequestError, match="no file of yours"):
            other.batches.create(input_file_id=batch.input_file_id, endpoint=URL, completion_window="24h")
        with pytest.raises(openai.AuthenticationError):
            list(client_of(server, "tp-three").files.list())


PART = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\n\r\n%b\r\n'
PURPOSE, CONTENT, END = PART % (b"purpose", b"batch"), FILE % (b"a", b"{}"), b"--b--\r\n"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "no end"),
        (END, "no file"),
        (PURPOSE + END, "no file"),
        (CONTENT + END, "purpose must be batch"),
        (PART % (b"purpose", b"fine-tune") + CONTENT + END, "purpose must be batch"),
        (PURPOSE + CONTENT, "no end"),
        (PURPOSE + CONTENT + CONTENT + END, "more than one file"),
        (PART % (b"purpose", b"b" * 5000) + CONTENT + END, "too long"),
        (PURPOSE * 30 + CONTENT + END, "too many parts"),
        (b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n" + END, "no name"),
        (b"--b\r\nX: " + b"y" * 20_000, "headers of a part"),
        (PURPOSE + FILE % (b"a", b"x" * 3000) + END, "3000|2000"),
        (PURPOSE + PART % (b"expires_after[seconds]", b"9") + CONTENT + END, "expires_after"),
    ],
)
def test_a_hostile_upload_is_refused_and_leaves_nothing(tmp_path: Path, body: bytes, why: str) -> None:
    with router(tmp_path, batch={"file_bytes": 2000}) as server:
        answer = server.client.post(
            "/v1/files", content=body, headers={"content-type": "multipart/form-data; boundary=b"}
        )
        assert answer.status_code == 400, answer.text
        assert any(one in answer.json()["error"]["message"] for one in why.split("|"))
        assert list(tmp_path.glob("tenants/*/files/*")) == []


def test_an_upload_is_the_same_whatever_pieces_it_comes_in_and_its_name_is_no_path(tmp_path: Path) -> None:
    content = b"\r\n--b\r\n--\r\n\r--c--\r\n" * 20
    body = (
        FILE.replace(b"--b", b"--bound") % (b"../../etc/passwd", content)
        + PURPOSE.replace(b"--b", b"--bound")
        + b"--bound--"
    )
    with router(tmp_path) as server:
        for seed in range(6):
            draw = random.Random(seed)

            def pieces(draw: random.Random = draw) -> Iterator[bytes]:
                at = 0
                while at < len(body):
                    size = draw.choice([1, 2, 3, 7, 40])
                    yield body[at : at + size]
                    at += size

            headers = {"content-type": 'multipart/form-data; boundary="bound"'}
            stored = server.client.post("/v1/files", content=pieces(), headers=headers).json()
            assert (stored["filename"], stored["bytes"]) == ("../../etc/passwd", len(content))
            assert server.client.get(f"/v1/files/{stored['id']}/content").content == content
    assert {path.parent.name for path in tmp_path.rglob("file-*")} == {"files"}


def test_a_form_that_is_none_and_ids_that_are_paths_are_refused(tmp_path: Path) -> None:
    with router(tmp_path) as server:
        assert server.client.post("/v1/files", json={}).status_code == 415
        for path in (
            "/v1/files/..%2f..%2fetc%2fpasswd",
            "/v1/files/file-x/content",
            "/v1/batches/..",
            "/v1/files/a/b/c",
        ):
            assert server.client.get(path).status_code == 404
        assert server.client.get(f"/v1/batches?{'&'.join(['a=1'] * 40)}").status_code == 400
        body = {"input_file_id": "file-x", "endpoint": URL, "completion_window": "24h", "metadata": {"k": "\ud800"}}
        headers = {"content-type": "application/json"}
        answer = server.client.post("/v1/batches", content=json.dumps(body), headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata")
        for query in ("limit=0", "limit=x", "order=up", "after=file-x"):
            assert server.client.get(f"/v1/files?{query}").status_code in (400, 404)


def test_without_a_folder_the_endpoints_say_what_to_set() -> None:
    with serving(FakeCluster(1, 1)) as server:
        for method, path in (("GET", "/v1/files"), ("POST", "/v1/batches"), ("GET", "/v1/files/file-1")):
            answer = server.client.request(method, path)
            assert answer.status_code == 404
            assert "batch.folder" in answer.json()["error"]["message"]


def test_a_full_disk_refuses_uploads_and_batches_wait_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "DISK_RETRY_S", 0.05)
    with router(tmp_path) as server:
        client = client_of(server)
        server.pause("decode")
        batch = submit(client, [line(number) for number in range(6)])
        server.wait_until(lambda: server.service.core.requests.in_flight == 6)
        with monkeypatch.context() as patched:

            def full(*_: object) -> None:
                raise StorageFull("the server's disk is full; try again later")

            patched.setattr(BatchStore, "check_room", full)
            server.resume()
            runner = runner_of(server)
            server.wait_until(lambda: any(run.full_until for run in runner.runs.values()))
            answer = server.client.post("/v1/files", files={"file": b"{}"}, data={"purpose": "batch"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (507, "storage_full")
            assert server.complete(max_tokens=4)["choices"], "others go on"
            assert client.batches.retrieve(batch.id).status == "in_progress"
        assert ended(client, batch.id).status == "completed"


def test_a_batch_that_was_checked_while_the_disk_was_full_begins_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "DISK_RETRY_S", 0.05)
    with router(tmp_path) as server:
        client, runner, tried = client_of(server), runner_of(server), list[str]()
        with monkeypatch.context() as patched:

            def full(store: BatchStore, place: BatchPlace, batch: StoredBatch) -> None:
                tried.append(batch.id)
                raise OSError(errno.ENOSPC, "No space left on device")

            server.call(lambda: setattr(server.service, "leaving", True))
            batch = submit(client, [line(number) for number in range(3)])
            patched.setattr(BatchStore, "keep", full)
            server.call(lambda: setattr(server.service, "leaving", False))
            server.wait_until(lambda: len(tried) > 2)
            assert "twinpool_batches_without_disk 1.0" in server.client.get("/metrics").text
            assert server.call(lambda: [run.batch.status for run in runner.runs.values()]) == ["validating"]
        assert ended(client, batch.id).status == "completed"


def test_one_tenant_leaves_places_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "MAX_CLAIMED", 4)
    keys = KeyFile(tuple(ApiKey(who, who, digest_of(f"tp-{who}")) for who in ("one", "two")))
    write_key_file(tmp_path / "keys.json", keys)
    with router(tmp_path / "batches", security={"keys_file": str(tmp_path / "keys.json")}) as server:
        server.pause("decode")
        many, few = client_of(server, "tp-one"), client_of(server, "tp-two")
        batches = [submit(many, [line(number)]) for number in range(6)]
        server.wait_until(lambda: server.service.core.requests.in_flight == 2)
        batch = submit(few, [line(9)])
        server.wait_until(lambda: server.service.core.requests.in_flight == 3)
        server.resume()
        assert ended(few, batch.id).status == "completed"
        assert {ended(many, one.id).status for one in batches} == {"completed"}


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 4}),
        ("/v1/embeddings", {"input": "hi"}),
    ],
)
def test_each_kind_of_request_is_answered_as_alone(tmp_path: Path, url: Any, body: dict[str, Any]) -> None:
    with router(tmp_path) as server:
        client = client_of(server)
        lines = [{"custom_id": "a", "method": "POST", "url": url, "body": body | {"seed": 3}}]
        if url != "/v1/chat/completions":
            del lines[0]["body"]["seed"]
            body["temperature"] = 0
        content = json.dumps(lines[0]).encode() + b"\n" + b"\n" * 1000
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
        (found,) = lines_of(client, ended(client, batch.id).output_file_id)
        assert found["response"]["status_code"] == 200
        assert found["response"]["body"]["object"] in ("chat.completion", "response", "list")


def test_of_two_routers_one_runs_a_batch_and_the_other_takes_over_when_it_leaves(tmp_path: Path) -> None:
    with router(tmp_path) as stays:
        with router(tmp_path, batch={"concurrency": 3}) as leaves:
            leaves.pause("decode")
            stays.call(lambda: setattr(stays.service, "leaving", True))
            batch = submit(client_of(leaves), [line(number) for number in range(9)])
            leaves.wait_until(lambda: leaves.service.core.requests.in_flight == 3)
            stays.call(lambda: setattr(stays.service, "leaving", False))
            looks = BatchStore.claim
            assert client_of(stays).batches.retrieve(batch.id).status == "in_progress"
            assert looks(runner_of(stays).store, next(runner_of(stays).store.waiting())) is None
            assert stays.service.core.requests.in_flight == 0
            leaves.call(lambda: setattr(leaves.service, "leaving", True))
            done = ended(client_of(stays), batch.id)
            leaves.resume()
        found = lines_of(client_of(stays), done.output_file_id)
        assert sorted(one["custom_id"] for one in found) == [f"line-{number}" for number in range(9)]


def test_lines_are_background_unmetered_and_begin_only_while_a_decode_worker_runs_nothing_else(tmp_path: Path) -> None:
    keys = {
        "tenants": {"one": {"requests_per_minute": 5}},
        "keys": [{"id": "k", "tenant": "one", "sha256": digest_of("tp-one")}],
    }
    (tmp_path / "keys.json").write_text(json.dumps(keys))
    with router(tmp_path / "batches", security={"keys_file": str(tmp_path / "keys.json")}) as server:
        client = client_of(server, "tp-one")
        server.pause("decode")
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "seed": 1}
        with httpx.Client(base_url=server.url, headers={"authorization": "Bearer tp-one"}, timeout=WAIT_S) as live:
            stream = live.build_request("POST", URL, json={**body, "stream": True})
            answer = live.send(stream, stream=True)
            server.wait_until(lambda: server.service.core.requests.in_flight == 1)
            batch = submit(client, [line(number) for number in range(20)])
            runner = runner_of(server)
            server.wait_until(lambda: any(run.begun for run in runner.runs.values()))
            assert server.call(lambda: IdleCapacity(server.service, 0.0).requests(16)) == 0
            assert runner.asking == 0
            server.resume()
            answer.read()
            assert ended(client, batch.id).status == "completed"
            assert server.service.admission.tenants.places["one"] == 0
        text = server.client.get("/metrics").text
        assert 'twinpool_batch_lines_total{result="completed"} 20.0' in text
        assert "twinpool_time_to_first_token_seconds_count 1.0" in text, "times of lines are in none"


def test_the_command_submits_waits_writes_and_goes_on_with_what_it_has_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batch_command, "POLL_S", 0.01)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line(number)) + "\n" for number in range(5)))
    with router(tmp_path / "batches") as server:

        def twinpool() -> int:
            words = ["batch", str(source), "--output", str(target), "--url", server.url]
            return cli.run(command_line.parser().parse_args(words))

        assert twinpool() == 0
        found = [json.loads(one) for one in target.read_text().splitlines()]
        assert sorted(one["custom_id"] for one in found) == [f"line-{number}" for number in range(5)]
        assert "completed: 5 of 5 answered" in capsys.readouterr().out
        source.write_text(source.read_text() + json.dumps(line(9, max_tokens=-1)))
        batch = submit(client_of(server), [json.loads(one) for one in source.read_text().splitlines()])
        begun = target.with_name("out.jsonl.batch")
        begun.write_text(json.dumps({"file": hashlib.sha256(source.read_bytes()).hexdigest(), "batch": batch.id}))
        assert twinpool() == 1, "one line failed"
        assert len(list(client_of(server).batches.list())) == 2, "none was submitted"
        assert not begun.exists()
        assert json.loads(target.with_name("out.jsonl.errors").read_text())["custom_id"] == "line-9"
        source.write_text("nonsense")
        assert twinpool() == 2


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("seed", [1])
async def test_whenever_routers_are_killed_each_line_is_answered_once(tmp_path: Path, seed: int) -> None:
    draw, total = random.Random(seed), 300
    config = tmp_path / "config.json"
    batch = {"folder": str(tmp_path / "batches"), "concurrency": 4, "sync_s": 0.005}
    config.write_text(json.dumps(config_from_dict({"batch": batch}).to_dict()))
    content = b"".join(json.dumps(line(number)).encode() + b"\n" for number in range(total))
    points = sorted(draw.sample(range(0, total - 40), 3))

    def kept() -> int:
        return sum(
            path.read_bytes().count(b"\n")
            for path in (tmp_path / "batches").glob("tenants/*/files/file-*")
            if path.suffix == ""
        )

    async with grpc_cluster(FakeCluster()) as controller:
        batch_id = input_id = ""
        for point in (*points, None):
            reading, writing = os.pipe()
            arguments = (
                "--controller",
                controller,
                "--port",
                "0",
                "--config-json",
                str(config),
                "--ready-fd",
                str(writing),
            )
            process = subprocess.Popen(
                command(*arguments), cwd=ROOT, pass_fds=[writing], stderr=subprocess.PIPE, env=ENVIRONMENT
            )
            os.close(writing)
            try:
                assert await read_line(reading) == b"ready\n"
                assert process.stderr is not None
                url = "http://" + json.loads(process.stderr.readline())["address"]
                asyncio.get_running_loop().run_in_executor(None, process.stderr.read)
                async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, trust_env=False) as client:
                    if not batch_id:
                        form = {"files": {"file": ("in", content)}, "data": {"purpose": "batch"}}
                        input_id = (await client.post("/v1/files", **form)).json()["id"]  # type: ignore[arg-type]
                        body = {"input_file_id": input_id, "endpoint": URL, "completion_window": "24h"}
                        batch_id = (await client.post("/v1/batches", json=body)).json()["id"]
                    deadline = time.monotonic() + WAIT_S
                    while point is None or kept() - total < point:
                        assert time.monotonic() < deadline, "it doesn't go on"
                        found = (await client.get(f"/v1/batches/{batch_id}")).json()
                        if found["status"] == "completed":
                            break
                    if point is None:
                        output = (await client.get(f"/v1/files/{found['output_file_id']}/content")).text.splitlines()
                        answers = [json.loads(one) for one in output]
                        assert sorted(one["custom_id"] for one in answers) == sorted(f"line-{n}" for n in range(total))
                        assert found["request_counts"] == {"total": total, "completed": total, "failed": 0}
            finally:
                process.kill()
                process.wait()
                os.close(reading)
