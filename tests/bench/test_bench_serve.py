"""The load generator against a server whose behaviour is known."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from bench.common.latency_report import Slo, summarize
from bench.serving import serve_load as serve
from twinpool.cli.replay.openai_client import Outcome

_spec = importlib.util.spec_from_file_location("sse_server", Path(__file__).with_name("sse_server.py"))
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
SseServer = _module.SseServer


def drive(tmp_path: Path, *flags: str, code: int = 0) -> dict[str, Any]:
    """Run the command and return its JSON."""
    out = tmp_path / "out.json"
    assert serve.main([*flags, "--warmup", "0", "--records", "--json", str(out)]) == code
    written: dict[str, Any] = json.loads(out.read_text())
    return written


def run_ways(tmp_path: Path, *ways: str, code: int = 0, more: tuple[str, ...] = ()) -> dict[str, Any]:
    flags = ("--concurrency", "1", "--requests", str(len(ways)), "--output-tokens", "8", "--input-tokens", "16", *more)
    with SseServer(*ways).serving() as server:
        side: dict[str, Any] = drive(tmp_path, "--url", server.url, *flags, code=code)["sides"]["endpoint"]
    return side


def test_a_good_run_counts_everything_once(tmp_path: Path) -> None:
    side = run_ways(tmp_path, "fine", "fine", "in one piece")
    assert (side["requests"], side["succeeded"], side["errors"], side["miscounted"]) == (3, 3, {}, 0)
    assert side["ttft_ms"]["count"] == side["e2e_ms"]["count"] == side["tpot_ms"]["count"] == 3
    assert side["itl_ms"]["count"] == 3 * 7
    assert side["output_tokens_per_s"] == pytest.approx(24 / side["wall_s"])
    assert side["input_tokens_per_s"] == pytest.approx(48 / side["wall_s"])
    assert side["ttft_ms"]["p50"] <= side["e2e_ms"]["p50"]
    assert side["cached_share"] == pytest.approx(4 / 16)


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
def test_what_did_not_end_well_is_an_error_and_never_a_success(tmp_path: Path, way: str, kind: str) -> None:
    side = run_ways(tmp_path, "fine", way, "fine", code=1)
    assert side["succeeded"] == 2
    assert side["errors"] == {kind: 1}
    assert side["ttft_ms"]["count"] == side["e2e_ms"]["count"] == 2
    assert side["good_share"] == pytest.approx(2 / 3)


def test_a_connection_that_breaks_is_an_error(tmp_path: Path) -> None:
    side = run_ways(tmp_path, "reset", code=1)
    assert side["succeeded"] == 0
    assert sum(side["errors"].values()) == 1


def test_a_server_that_is_silent_runs_into_the_deadline(tmp_path: Path) -> None:
    side = run_ways(tmp_path, "silent", "fine", code=1, more=("--timeout-s", "1"))
    assert side["errors"] == {"timeout": 1}
    assert side["succeeded"] == 1


def test_nobody_listening_ends_with_a_clear_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with SseServer().serving() as server:
        url = server.url
    assert serve.main(["--url", url, "--concurrency", "1"]) == 2
    assert f"{url}/v1/models failed" in capsys.readouterr().err


def test_an_answer_of_the_wrong_length_is_flagged_and_not_good(tmp_path: Path) -> None:
    side = run_ways(tmp_path, "short", "fine")
    assert side["succeeded"] == 2
    assert side["miscounted"] == 1
    assert side["good_share"] == 0.5


def test_the_body_asks_for_greedy_tokens_of_a_set_number(tmp_path: Path) -> None:
    with SseServer().serving() as server:
        extra = ("--extra", '{"seed": 5, "temperature": 1}', "--model", "named")
        drive(tmp_path, "--url", server.url, "--concurrency", "1", "--requests", "1", *extra)
    (body,) = server.bodies
    assert body["model"] == "named"
    assert body["max_tokens"] == 64
    assert len(body["prompt"]) == 256
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert (body["seed"], body["temperature"]) == (5, 1)


def test_chat_sends_text_whose_length_was_calibrated(tmp_path: Path) -> None:
    with SseServer().serving() as server:
        flags = ("--endpoint", "chat", "--concurrency", "1", "--requests", "2", "--input-tokens", "100")
        side = drive(tmp_path, "--url", server.url, *flags)["sides"]["endpoint"]
    words = len(server.bodies[0]["messages"][0]["content"].split())
    assert 45 <= words <= 50, "the server counts two tokens a word"
    assert side["itl_ms"]["count"] == 2 * 63, "the role is not a token"
    assert side["errors"] == {}


def test_a_closed_loop_keeps_so_many_under_way(tmp_path: Path) -> None:
    with SseServer("silent").serving() as server:
        flags = ("--concurrency", "5", "--requests", "10", "--timeout-s", "0.1")
        drive(tmp_path, "--url", server.url, *flags, code=1)
    assert server.max_running == 5


@pytest.mark.slow
def test_an_open_loop_sends_when_due_however_slow_the_answers(tmp_path: Path) -> None:
    with SseServer("silent").serving() as server:
        flags = ("--rate", "500", "--requests", "20", "--timeout-s", "0.3")
        side = drive(tmp_path, "--url", server.url, *flags, code=1)["sides"]["endpoint"]
    assert server.max_running == 20
    assert side["lag_ms"]["count"] == 20


def test_the_committed_trace_plays(tmp_path: Path) -> None:
    trace = Path(__file__).parents[2] / "bench" / "traces" / "conversation_200.jsonl"
    with SseServer().serving() as server:
        flags = ("--trace", str(trace), "--limit", "12", "--scale-lengths", "0.01", "--speed", "1000")
        side = drive(tmp_path, "--url", server.url, *flags)["sides"]["endpoint"]
    assert side["succeeded"] == 12
    assert side["miscounted"] == 0


def test_a_baseline_gets_the_same_load_in_turns_and_ratios_are_written(tmp_path: Path) -> None:
    with SseServer().serving() as ours, SseServer().serving() as theirs:
        flags = ("--concurrency", "1", "--requests", "3", "--rounds", "2", "--output-tokens", "4")
        out = drive(tmp_path, "--url", ours.url, "--baseline-url", theirs.url, *flags)
    prompts = [[body["prompt"] for body in server.bodies] for server in (ours, theirs)]
    assert prompts[0] == prompts[1]
    assert len({tuple(prompt) for prompt in prompts[0]}) == 6, "no round repeats another's content"
    assert out["ratios"]["output_tokens_per_s"] > 0
    assert out["sides"]["baseline"]["succeeded"] == 6


def test_a_baseline_may_end_without_done_but_not_be_cut(tmp_path: Path) -> None:
    with SseServer().serving() as ours, SseServer("no done", "cut").serving() as theirs:
        flags = ("--concurrency", "1", "--requests", "2", "--rounds", "1", "--output-tokens", "4")
        more = ("--baseline-without-done", "--baseline-extra", '{"ignore_eos": null, "top_k": 1}')
        out = drive(tmp_path, "--url", ours.url, "--baseline-url", theirs.url, *flags, *more, code=1)
    assert out["sides"]["endpoint"]["succeeded"] == 2
    assert out["sides"]["baseline"]["errors"] == {"cut": 1}
    assert "ignore_eos" not in theirs.bodies[0]
    assert theirs.bodies[0]["top_k"] == 1
    assert ours.bodies[0]["ignore_eos"] is True


def test_goodput_counts_what_keeps_both_limits() -> None:
    def outcome(ttft_s: float, tpot_s: float) -> Outcome:
        arrivals = [10 + ttft_s, 10 + ttft_s + tpot_s, 10 + ttft_s + 2 * tpot_s]
        return Outcome(10, 10, 4, 3, arrivals[-1], arrivals, prompt_tokens=4, completion_tokens=3)

    outcomes = [outcome(0.1, 0.02), outcome(0.3, 0.02), outcome(0.1, 0.06)]
    summary = summarize(outcomes, Slo(ttft_ms=200, tpot_ms=50), wall_s=2.0, cpu_s=0.1)
    assert summary.good_share == pytest.approx(1 / 3)
    assert summary.goodput_per_s == pytest.approx(0.5)
    assert summary.tpot_ms.p50 == pytest.approx(20)
    assert summary.client_cpu_share == pytest.approx(0.05)
    assert summarize(outcomes, Slo(), wall_s=2.0, cpu_s=0.1).good_share == 1.0


def test_tokens_of_answers_that_failed_count_nowhere() -> None:
    """Neither among those that went in a second, nor as what a cache had."""
    good = Outcome(10, 10, 40, 3, 11.0, [10.2, 10.6, 11.0], prompt_tokens=40, completion_tokens=3, cached_tokens=10)
    cut = Outcome(10, 10, 600, 3, 11.0, [10.5], prompt_tokens=600, completion_tokens=1, cached_tokens=600, error="cut")
    refused = Outcome(10, 10, 900, 3, 10.1, error="http 429")
    summary = summarize([cut, good, refused], Slo(), wall_s=2.0, cpu_s=0.1)
    assert (summary.requests, summary.succeeded, summary.errors) == (3, 1, {"cut": 1, "http 429": 1})
    assert summary.requests_per_s == 0.5
    assert summary.good_share == pytest.approx(1 / 3)
    assert (summary.input_tokens_per_s, summary.output_tokens_per_s, summary.cached_share) == (20.0, 1.5, 0.25)
    for spread in (summary.ttft_ms, summary.tpot_ms, summary.e2e_ms):
        assert spread.count == 1
    assert summary.lag_ms.count == 3, "the client's lateness is of all that it sent"


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--rate", "1", "--concurrency", "2"],
        ["--concurrency", "0"],
        ["--rate", "1", "--input-tokens", "x"],
        ["--rate", "1", "--extra", "[]"],
        ["--rate", "1", "--token-range", "5:5"],
        ["--rate", "1", "--header", "nameonly"],
    ],
)
def test_flags_that_make_no_sense_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        serve.main(["--url", "http://127.0.0.1:1", *flags])
    assert stop.value.code == 2
