from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.router_stub import RouterStub, router_stub, row
from tests.support.served_cluster import ROOT
from twinpool.cli import command_line
from twinpool.cli import commands as cli
from twinpool.cli.admin_client import STATUS_KEYS, AdminClient
from twinpool.cli.operator.drain_command import DrainCommand, ProgressLines, ending
from twinpool.cluster.controller import controller_process
from twinpool.cluster.processes.run_folder import write_run_file
from twinpool.cluster.serve.terminal import curl_line, url_of
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import Config


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RouterStub]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("TWINPOOL_URL", raising=False)
    with router_stub() as running:
        yield running


def twinpool(*arguments: str) -> int:
    return cli.run(command_line.parser().parse_args(arguments))


def test_without_a_cluster_the_exit_code_is_3(stub: RouterStub, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["status"], ["check"], ["drain", "decode-0"], ["undrain", "decode-0"]):
        assert twinpool(*command) == 3
        assert "no cluster is running" in capsys.readouterr().err
    assert twinpool("status", "--url", "http://127.0.0.1:1") == 3
    assert "no router answers" in capsys.readouterr().err


def test_wrong_usage_is_exit_code_2(stub: RouterStub, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["nonsense"], ["drain"], ["serve", "--prefill", "many"]):
        with pytest.raises(SystemExit) as caught:
            command_line.parser().parse_args(command)
        assert caught.value.code == 2
    assert twinpool("serve", "--prefill", "0") == 2
    assert twinpool("status", "--url", "ftp://somewhere") == 2
    assert twinpool("drain", "decode-0", "--url", stub.url, "--timeout", "0") == 2
    assert stub.calls == []


def test_the_router_is_found_by_url_then_by_environment_then_by_run_file(
    stub: RouterStub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = write_run_file(stub.url, tmp_path, "demo")
    assert twinpool("status", "--json") == 0
    assert len(stub.calls) == 1
    monkeypatch.setenv("TWINPOOL_URL", "http://127.0.0.1:1")
    assert twinpool("status") == 3
    assert twinpool("status", "--url", stub.url) == 0
    path.unlink()


def test_status_json_has_exactly_the_promised_keys(stub: RouterStub, capsys: pytest.CaptureFixture[str]) -> None:
    assert twinpool("status", "--json", "--url", stub.url) == 0
    workers = json.loads(capsys.readouterr().out)["workers"]
    assert [list(worker) for worker in workers] == [list(STATUS_KEYS)] * 2
    assert (workers[0]["name"], workers[0]["role"], workers[0]["pages_free"]) == ("prefill-0", "prefill", 64)
    assert workers[0]["counters"] == {"pages_evicted": 3.0}


def test_the_table_of_status_cuts_nothing_in_a_pipe(stub: RouterStub, capsys: pytest.CaptureFixture[str]) -> None:
    name = "decode-1234567890"
    stub.tables = [[row(name, node="a-node-with-a-very-long-name.cluster.example", pages_total=123456789)]]
    assert twinpool("status", "--url", stub.url) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in (name, "a-node-with-a-very-long-name.cluster.example", "123456789"))


def test_check_prints_the_report_and_fails_on_a_violation(stub: RouterStub, capsys: pytest.CaptureFixture[str]) -> None:
    checked = {"pages": 64, "slots": 8, "leases": 0, "rooms": 0}
    stub.report = {"ok": True, "workers": [{"name": "decode-0", "checked": checked, "violations": []}]}
    assert twinpool("check", "--json", "--url", stub.url) == 0
    assert json.loads(capsys.readouterr().out) == stub.report
    stub.report = {"ok": False, "workers": [{"name": "decode-0", "checked": checked, "violations": ["page 3 is lost"]}]}
    assert twinpool("check", "--url", stub.url) == 1
    assert "decode-0: page 3 is lost" in capsys.readouterr().out


def test_a_refusal_is_exit_code_1_with_the_routers_words(stub: RouterStub, capsys: pytest.CaptureFixture[str]) -> None:
    for status, words in ((409, "decode-0 is the last decode worker"), (404, "no worker is named x")):
        stub.refusal = (status, words)
        for command in ("drain", "undrain"):
            assert twinpool(command, "decode-0", "--url", stub.url) == 1
            assert words in capsys.readouterr().err


def test_drain_waits_until_the_worker_has_left_and_says_for_what(stub: RouterStub) -> None:
    stub.tables = [
        [row("decode-0", "ready", running=3)],
        [row("decode-0", "draining", running=2, waiting=1)],
        [row("decode-0", "draining", outgoing=1)],
        [row("decode-0", "draining", outgoing=1)],
        [row("decode-0", "left")],
    ]
    clock, said = ManualClock(), list[str]()
    operator = AdminClient(stub.url, clock.now, lambda s: clock.advance(2.0))
    report = DrainCommand(operator, "decode-0", force=True, timeout_s=60.0, show=ProgressLines(said.append).show).run()
    said.append(ending(report))
    assert stub.calls[0] == ("POST", "/cluster/drain/decode-0?force=true")
    assert said == [
        "decode-0 is draining: waits for 2 running, 1 waiting",
        "decode-0 is draining: waits for 1 outgoing transfers",
        "decode-0 has left after 8.0 s",
    ]


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (row("decode-0", "ready"), "was undrained"),
        (row("decode-0", "dead"), "died while it was draining"),
        (row("decode-0", "draining", running=1), "has not left after 10 s; decode-0 waits for 1 running"),
    ],
)
def test_a_drain_that_does_not_end_well_is_a_refusal(stub: RouterStub, end: dict[str, object], words: str) -> None:
    stub.tables = [[row("decode-0", "draining", running=1)], [end]]
    clock = ManualClock()
    operator = AdminClient(stub.url, clock.now, lambda s: clock.advance(2.0))
    report = DrainCommand(operator, "decode-0", force=False, timeout_s=10.0).run()
    assert not report.left
    assert words in report.why


def test_a_server_that_is_no_router_counts_as_no_cluster(stub: RouterStub, monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(method: str, path: str) -> tuple[int, dict[str, object]]:
        return 404, {"detail": "Not Found"}

    monkeypatch.setattr(stub, "answer", odd)
    assert twinpool("status", "--url", stub.url) == 3


def test_the_admin_token_travels_as_a_bearer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Opener:
        def open(self, request: object, timeout: float) -> object:
            seen.append(request.headers)  # type: ignore[attr-defined]
            raise OSError("far away")

    monkeypatch.setattr(urllib.request, "build_opener", lambda *handlers: Opener())
    monkeypatch.setenv("TWINPOOL_ADMIN_TOKEN", "secret")
    assert twinpool("status", "--url", "http://192.0.2.1:8000") == 3
    assert seen[0]["Authorization"] == "Bearer secret"


def test_urls_and_curl_lines_can_be_pasted() -> None:
    assert url_of("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert url_of("::", 80) == "http://[::1]:80"
    assert url_of("10.0.0.1", 80) == "http://10.0.0.1:80"
    assert """it'"'"'s""" in curl_line("http://x", "it's")
    assert "Bearer" not in curl_line("http://x", "m")
    assert "-H 'Authorization: Bearer KEY' -H" in curl_line("http://x", "m", key=True)


def test_up_says_what_it_would_do_of_a_file_that_is_a_configuration(
    stub: RouterStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    line = ["up", str(file), "--dry-run"]
    assert cli.run(command_line.parser().parse_args(line)) == 2
    file.write_text("launch: {routers: two}")
    assert cli.run(command_line.parser().parse_args(line)) == 2
    assert "launch.routers" in capsys.readouterr().err
    file.write_text("launch: {routers: 2}")
    assert cli.run(command_line.parser().parse_args(line)) == 0
    assert "it would be launched" in capsys.readouterr().out


def test_a_controller_of_its_own_takes_the_paths_of_serves_file_as_serve_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = list[Config]()

    def keep(config: Config, place: object) -> int:
        kept.append(config)
        return 0

    monkeypatch.setattr(controller_process, "keep_controller", keep)
    monkeypatch.setenv("HOME", "/home/somebody")
    file = tmp_path / "c.yaml"
    file.write_text("cluster: {ledger: /shared/ledger}\nsecurity: {keys_file: ~/keys.json}\n")
    words = ["controller", "--address", "127.0.0.1", "--port", "7000", "--config", str(file)]
    assert cli.run(command_line.parser().parse_args(words)) == 0
    assert [config.security.keys_file for config in kept] == ["/home/somebody/keys.json"]


def test_an_interrupted_command_has_its_code_also_where_the_reader_of_its_output_is_gone() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    script = "import twinpool.cli.commands as commands\nprint('a line')\ncommands._end_now(commands.INTERRUPTED)"
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT, env=buffered, stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (130, b"")
