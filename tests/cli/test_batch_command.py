"""`twinpool batch` beside a router that does as told: exit codes, words, what is fetched, with what it goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from twinpool.cli import command_line
from twinpool.cli import commands as cli
from twinpool.cli.load import batch_command

PARSER = command_line.parser()
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}


class Router:
    """A router's files and batches, as far as the command asks. `looks`: what each look at a batch finds, the last one
    from then on: a status, an HTTP status, or an exception."""

    def __init__(self) -> None:
        self.looks: list[str | int | Exception] = ["validating", "in_progress", "completed"]
        self.files = {"file-out": b"answers\n", "file-err": b"errors\n"}
        self.published = {"output_file_id": "file-out", "error_file_id": None}
        self.counts = {"total": 3, "completed": 3, "failed": 0}
        self.errors: Any = None
        self.submitted: list[tuple[str, bytes]] = []
        """Endpoint and content of each batch."""
        self.uploaded = b""
        self.seconds = 0.0
        self.breaks: Exception | None = None
        """What happens in the middle of a file's content."""

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if request.method == "POST" and path == "/v1/files":
            self.uploaded = request.read()
            return httpx.Response(200, json={"id": "file-in"})
        if request.method == "POST":
            body = json.loads(request.read())
            self.submitted.append((body["endpoint"], self.uploaded))
            return httpx.Response(200, json={"id": f"batch_{len(self.submitted)}"})
        if path.startswith("/v1/files/"):
            return httpx.Response(200, content=self._content(self.files[path.split("/")[3]]))
        if path.rpartition("_")[2] not in map(str, range(1, len(self.submitted) + 1)):
            return httpx.Response(404, json={})
        return self._look()

    def _content(self, content: bytes) -> Iterator[bytes]:
        yield content[:3]
        if self.breaks is not None:
            raise self.breaks
        yield content[3:]

    def _look(self) -> httpx.Response:
        found = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(found, Exception):
            raise found
        if isinstance(found, int):
            return httpx.Response(found, json={"error": {"message": f"status {found}"}})
        begun = found != "validating"
        counts = self.counts if begun else dict.fromkeys(self.counts, 0)
        published = self.published if found in ("completed", "cancelled") else dict.fromkeys(self.published)
        return httpx.Response(200, json={"status": found, "request_counts": counts, "errors": self.errors, **published})


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Router:
    made = Router()

    @contextmanager
    def client(url: str | None, ca: str) -> Iterator[httpx.Client]:
        with httpx.Client(base_url="http://router", transport=httpx.MockTransport(made.answer)) as one:
            yield one

    monkeypatch.setattr(batch_command, "_client", client)
    monkeypatch.setattr(batch_command, "POLL_S", 10.0)
    monkeypatch.setattr(batch_command, "time", SimpleNamespace(sleep=made.sleep, monotonic=lambda: made.seconds))
    return made


def twinpool(source: Path, *words: str) -> int:
    return cli.run(PARSER.parse_args(["batch", str(source), *words]))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "in.jsonl").write_bytes(b"\n" + json.dumps(LINE).encode() + b"\n")
    return tmp_path / "in.jsonl"


DOWN = httpx.ConnectError("refused")


@pytest.mark.parametrize(
    ("looks", "code", "says"),
    [
        (["completed"], 0, "completed: 3 of 3 answered"),
        (["validating", "in_progress", "finalizing", "completed"], 0, "completed"),
        (["cancelled"], 1, "cancelled"),
        (["expired"], 1, "expired"),
        (["failed"], 1, "failed"),
        ([DOWN] * 11 + ["in_progress"] + [503] * 11 + ["in_progress"] + [DOWN] * 11 + ["completed"], 0, "completed"),
        (["in_progress", DOWN], 3, "no router answers at http://router"),
        (["in_progress", 503], 3, "status 503"),
        (["in_progress", 507, "completed"], 1, "status 507"),
        (["in_progress", 401], 1, "status 401"),
    ],
)
def test_it_waits_for_the_end_while_a_router_may_come_back(
    router: Router, source: Path, capsys: pytest.CaptureFixture[str], looks: list[Any], code: int, says: str
) -> None:
    router.looks, lasts = list(looks), 10 * len(looks)
    assert twinpool(source) == code
    told = capsys.readouterr()
    assert says in (told.out if "answered" in told.out else told.err)
    waited = batch_command.AWAY_S if looks[-1] in (DOWN, 503) else 0
    assert waited <= router.seconds <= waited + lasts
    begun = source.with_name("in.answers.jsonl.batch")
    assert begun.exists() == (code == 3 or "status" in says), "a batch that has not ended is gone on with"
    router.looks = ["completed"]
    assert twinpool(source) == 0
    assert len(router.submitted) == (1 if code == 3 or "status" in says else 2)


def test_the_first_request_says_the_endpoint_and_all_of_the_file_is_sent(router: Router, source: Path) -> None:
    assert twinpool(source) == 0
    ((endpoint, content),) = router.submitted
    assert (endpoint, source.read_bytes() in content) == ("/v1/completions", True)


def test_another_content_is_another_batch_and_one_that_the_router_has_lost_too(router: Router, source: Path) -> None:
    router.looks = ["in_progress", 401]
    assert twinpool(source) == 1
    source.write_bytes(source.read_bytes() + json.dumps(LINE | {"custom_id": "b"}).encode())
    assert twinpool(source) == 1
    assert len(router.submitted) == 2
    begun = source.with_name("in.answers.jsonl.batch")
    begun.write_text(json.dumps(json.loads(begun.read_text()) | {"batch": "batch_77"}))
    router.looks = ["completed"]
    assert twinpool(source) == 0
    assert len(router.submitted) == 3


def test_answers_of_an_earlier_batch_do_not_stay_beside_the_new_ones(router: Router, source: Path) -> None:
    answers, errors = (source.with_name(f"in.answers.jsonl{end}") for end in ("", ".errors"))
    router.published["error_file_id"], router.counts = "file-err", {"total": 3, "completed": 2, "failed": 1}
    assert twinpool(source) == 1, "one has failed"
    assert (answers.read_bytes(), errors.read_bytes()) == (b"answers\n", b"errors\n")
    router.published["error_file_id"], router.counts = None, {"total": 3, "completed": 3, "failed": 0}
    router.files["file-out"] = b"new answers\n"
    assert twinpool(source) == 0
    assert answers.read_bytes() == b"new answers\n"
    assert {path.name for path in source.parent.iterdir()} == {source.name, answers.name}


@pytest.mark.parametrize("breaks", [httpx.ReadError("reset"), httpx.RemoteProtocolError(""), httpx.ReadTimeout("")])
def test_a_router_that_goes_away_while_it_sends_answers_is_told_and_they_are_fetched_again(
    router: Router, source: Path, capsys: pytest.CaptureFixture[str], breaks: Exception
) -> None:
    router.breaks = breaks
    assert twinpool(source) == 3
    told = capsys.readouterr().err
    assert "went away while it sent /v1/files/file-out/content" in told
    assert str(breaks) or type(breaks).__name__ in told
    assert {path.name for path in source.parent.iterdir()} == {source.name, "in.answers.jsonl.batch"}
    router.breaks = None
    assert twinpool(source) == 0
    assert source.with_name("in.answers.jsonl").read_bytes() == b"answers\n"
    assert len(router.submitted) == 1


def test_problems_of_an_input_are_told_with_their_lines(
    router: Router, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    router.looks, router.counts = ["failed"], {"total": 0, "completed": 0, "failed": 0}
    router.errors = {
        "data": [{"code": "c", "message": "twice", "line": 3}, {"code": "d", "message": "m", "line": None}]
    }
    assert twinpool(source) == 1
    told = capsys.readouterr().err
    assert "line 3: twice (c)\n" in told
    assert "\nm (d)\n" in told


@pytest.mark.parametrize("output", ["nowhere/out", "folder"])
def test_an_output_that_can_not_be_written_is_told(
    router: Router, source: Path, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    (source.parent / "folder").mkdir()
    assert twinpool(source, "--output", str(source.parent / output)) == 2
    assert f"can't write {source.parent / output}" in capsys.readouterr().err
