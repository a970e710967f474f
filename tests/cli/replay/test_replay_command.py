"""`twinpool replay` against servers whose behaviour is known."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.bench.sse_server import SseServer
from twinpool.cli import command_line
from twinpool.cli import commands as cli


def trace(folder: Path, *lines: tuple[float, int, int, list[int]]) -> Path:
    path = folder / "trace.jsonl"
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(keys, line, strict=True))) + "\n" for line in lines))
    return path


def replay(file: Path, server: SseServer, *flags: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON."""
    out = file.parent / "out.json"
    words = ["replay", str(file), "--url", server.url, "--json", str(out), *flags]
    return cli.run(command_line.parser().parse_args(words)), json.loads(out.read_text())


def test_requests_are_the_traces_and_equal_ids_are_equal_content(tmp_path: Path) -> None:
    file = trace(tmp_path, (0, 1024, 8, [7, 8]), (200, 1030, 4, [7, 9, 10]), (400, 600, 2, [9, 8]))
    with SseServer().serving() as server:
        code, out = replay(file, server, "--records", "--speed", "2", "--slo", "ttft=600,itl=600")
    # A client that was held up may send all at once: then they come in any order.
    bodies = sorted(server.bodies, key=lambda body: -body["max_tokens"])
    first, second, third = (body["prompt"] for body in bodies)
    assert (code, [len(first), len(second), len(third)]) == (0, [1024, 1030, 600])
    assert first[:512] == second[:512]
    assert first[512:] != second[512:1024]
    assert second[512:1024] == third[:512]
    assert first[512 : 512 + 88] == third[512:]
    assert [body["max_tokens"] for body in bodies] == [8, 4, 2]
    figures = out["figures"]
    assert (figures["sent"], figures["answered"], figures["errors"], figures["wrong"]) == (3, 3, {}, {})
    assert figures["good"] == 3
    assert figures["cached_share"] == pytest.approx(12 / 2654)
    assert figures["client_ceiling"] > 0
    assert [round(record["due_s"], 3) for record in out["records"]] == [0.0, 0.1, 0.2]


def test_another_seed_makes_other_prompts_of_the_same_shape(tmp_path: Path) -> None:
    file = trace(tmp_path, (0, 100, 1, [1]), (1, 100, 1, [1]))
    with SseServer().serving() as server:
        replay(file, server)
        replay(file, server, "--seed", "2")
    one, same, other, _ = (body["prompt"] for body in server.bodies)
    assert one == same != other


def test_limit_seconds_scale_and_context_cut_the_trace(tmp_path: Path) -> None:
    file = trace(tmp_path, *((100 * number, 1000, 100, [number, 99]) for number in range(20)))
    with SseServer().serving() as server:
        assert replay(file, server, "--limit", "4", "--speed", "100")[1]["figures"]["sent"] == 4
        assert replay(file, server, "--seconds", "0.5", "--speed", "2")[1]["figures"]["sent"] == 10
        server.bodies.clear()
        replay(file, server, "--limit", "1", "--scale-lengths", "0.1")
        replay(file, server, "--limit", "1", "--max-context", "64")
    scaled, cut = server.bodies
    assert (len(scaled["prompt"]), scaled["max_tokens"]) == (100, 10)
    assert (len(cut["prompt"]), cut["max_tokens"]) == (32, 32)


def test_seconds_count_from_a_traces_first_request_whenever_that_was(tmp_path: Path) -> None:
    file = trace(tmp_path, *((90_000 + 100 * number, 10, 1, [number]) for number in range(9)))
    with SseServer().serving() as server:
        _, out = replay(file, server, "--seconds", "0.2", "--speed", "2", "--records")
    assert [round(record["due_s"], 3) for record in out["records"]] == [0.0, 0.05, 0.1, 0.15]


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("cut", "cut"),
        ("no done", "no [DONE]"),
        ("error event", "error event (worker_died)"),
        ("refused", "http 429"),
        ("not json", "bad event"),
        ("plain", "not a stream"),
    ],
)
def test_each_kind_of_wrong_stream_is_counted_by_its_name(
    tmp_path: Path, way: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = trace(tmp_path, (0, 10, 8, [1]), (1, 10, 8, [1]))
    with SseServer("fine", way).serving() as server:
        code, out = replay(file, server)
    assert (code, out["figures"]["errors"], out["figures"]["answered"]) == (1, {kind: 1}, 1)
    assert f"ERROR {kind}: 1" in capsys.readouterr().out


def test_an_answer_of_another_length_is_wrong_and_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = trace(tmp_path, (0, 10, 8, [1]), (1, 10, 8, [1]))
    with SseServer("fine", "short").serving() as server:
        code, out = replay(file, server)
        assert (code, out["figures"]["errors"], out["figures"]["wrong"]) == (1, {}, {"answer's tokens differ": 1})
        assert "WRONG answer's tokens differ: 1" in capsys.readouterr().out
        # Where answers may end by themselves a shorter one is right.
        code, out = replay(file, server, "--extra", '{"ignore_eos": null}')
        assert (code, out["figures"]["wrong"]) == (0, {})
        assert "ignore_eos" not in server.bodies[-1]


def test_a_server_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    file = trace(tmp_path, (0, 10, 8, [1]))
    with SseServer("silent").serving() as server:
        code, out = replay(file, server, "--timeout", "0.2")
    assert (code, out["figures"]["errors"]) == (1, {"timeout": 1})


def test_never_more_than_the_bound_are_under_way_and_who_waits_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer begins before a request waits for a place: else a client that is late itself has places free."""
    waits = threading.Event()

    class Places(asyncio.Semaphore):
        async def acquire(self) -> Literal[True]:
            if self.locked():
                waits.set()
            return await super().acquire()

    monkeypatch.setattr(asyncio, "Semaphore", Places)
    file = trace(tmp_path, *((0, 10, 20, [number]) for number in range(12)))
    with SseServer(begins=waits).serving() as server:
        _, out = replay(file, server, "--concurrency", "3")
    assert waits.is_set()
    assert server.max_running <= 4, "three, and the question for the model"
    assert out["figures"]["held"]["p99"] > 0


def test_keys_are_taken_in_turn_and_are_in_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = trace(tmp_path, *((0, 10, 1, [number]) for number in range(4)))
    keys = tmp_path / "keys.txt"
    keys.write_text("tp-one\n\ntp-two\n")
    with SseServer().serving() as server:
        _, out = replay(file, server, "--keys", str(keys))
        sent = [head.split("Bearer ")[1].split("\r\n")[0] for head in server.heads]
        assert sorted(sent) == ["tp-one", "tp-one", "tp-two", "tp-two"]
        monkeypatch.setenv("TWINPOOL_API_KEY", "tp-three")
        replay(file, server)
        assert "Bearer tp-three" in server.heads[-1]
    assert "tp-" not in json.dumps(out) + capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--text", "--chat"])
def test_what_is_asked_before_the_run_has_a_key_as_well(flag: str, tmp_path: Path) -> None:
    """The model's name, and how many words make a token."""
    file, keys = trace(tmp_path, (0, 10, 1, [1])), tmp_path / "keys.txt"
    keys.write_text("tp-one\n")
    with SseServer().serving() as server:
        replay(file, server, "--keys", str(keys), flag)
    paths = [head.split()[1] for head in server.other_heads]
    assert paths == ["/v1/models", "/v1/chat/completions" if flag == "--chat" else "/v1/completions"]
    assert all("Bearer tp-one\r\n" in head for head in (*server.other_heads, *server.heads))


def test_chat_is_asked_with_text_of_the_right_length(tmp_path: Path) -> None:
    file = trace(tmp_path, (0, 512, 4, [1]))
    with SseServer().serving() as server:
        code, out = replay(file, server, "--chat")
    assert code == 0
    assert server.bodies[0]["max_completion_tokens"] == 4
    words = server.bodies[0]["messages"][0]["content"].split()
    assert 200 < len(words) < 300, "this server makes two tokens of a word"
    assert out["figures"]["wrong"] == {}


def test_plots_are_drawn_or_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = trace(tmp_path, (0, 10, 4, [1]), (1, 10, 1, [2]))
    with SseServer().serving() as server:
        if importlib.util.find_spec("matplotlib") is not None:
            assert replay(file, server, "--plots", str(tmp_path / "plots"))[0] == 0
            drawn = sorted((tmp_path / "plots").iterdir())
            assert [path.name for path in drawn] == ["first-tokens.png", "latencies.png", "load.png"]
            assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
        monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
        sent = len(server.bodies)
        words = ["replay", str(file), "--url", server.url, "--plots", str(tmp_path / "more")]
        assert cli.run(command_line.parser().parse_args(words)) == 2
        assert len(server.bodies) == sent


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--speed", "0"], "--speed must be above 0"),
        (["--slo", "ttft=fast"], "--slo takes ttft=SECONDS"),
        (["--slo", "ttft=0"], "above 0 seconds"),
        (["--token-range", "5:1"], "--token-range takes LOW:HIGH"),
        (["--extra", "[1]"], "--extra takes a JSON object"),
        (["--records"], "--records goes with --json"),
        (["--keys", "/nowhere"], "can't read /nowhere"),
        (["--max-context", "1"], "--max-context"),
    ],
)
def test_wrong_flags_are_refused_in_a_line(
    tmp_path: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = trace(tmp_path, (0, 10, 4, [1]))
    args = ["replay", str(file), "--url", "http://127.0.0.1:1", *flags]
    assert cli.run(command_line.parser().parse_args(args)) == 2
    assert words in capsys.readouterr().err


def test_a_file_that_is_no_trace_and_an_endpoint_that_is_away_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "odd.jsonl"
    file.write_text('{"timestamp": 0}\n')
    with SseServer().serving() as server:
        assert cli.run(command_line.parser().parse_args(["replay", str(file), "--url", server.url])) == 2
    assert "line 1" in capsys.readouterr().err
    args = ["replay", str(trace(tmp_path, (0, 10, 4, [1]))), "--url", "http://127.0.0.1:1"]
    assert cli.run(command_line.parser().parse_args(args)) == 1
    assert "failed" in capsys.readouterr().err
