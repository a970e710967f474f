"""The load generator against a server whose behaviour is known."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from bench.serving import serve_load as serve
from twinpool.cli.load import openai_client
from twinpool.cli.load.openai_client import Endpoint, Outcome
from twinpool.cli.load.replay_figures import ReplayFigures, figures_of
from twinpool.sim.scale.cluster_plan import AnswerTarget

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
    assert (side["sent"], side["answered"], side["errors"], side["wrong"]) == (3, 3, {}, {})
    assert side["ttft"]["count"] == side["answer"]["count"] == side["tpot"]["count"] == 3
    assert side["itl"]["count"] == 3 * 7
    assert side["output_tokens_per_s"] == pytest.approx(24 / side["wall_s"])
    assert side["input_tokens_per_s"] == pytest.approx(48 / side["wall_s"])
    assert side["ttft"]["p50"] <= side["answer"]["p50"]
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
    assert side["answered"] == 2
    assert side["errors"] == {kind: 1}
    assert side["ttft"]["count"] == side["answer"]["count"] == 2
    assert (side["good"], side["sent"]) == (2, 3)


def test_a_connection_that_breaks_is_an_error(tmp_path: Path) -> None:
    side = run_ways(tmp_path, "reset", code=1)
    assert side["answered"] == 0
    assert sum(side["errors"].values()) == 1


def test_a_server_that_is_silent_runs_into_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers once the first request has been given up, of which alone so little time is left."""
    left_s = [0.1, 60.0]

    async def stream(endpoint: Endpoint, request: bytes, outcome: Outcome, timeout_s: float) -> Outcome:
        assert timeout_s == 60.0
        outcome = await openai_client.stream(endpoint, request, outcome, left_s.pop(0))
        server.ways = ("fine",)
        return outcome

    monkeypatch.setattr(serve, "stream", stream)
    with SseServer("silent").serving() as server:
        flags = ("--concurrency", "1", "--requests", "2", "--timeout-s", "60")
        side = drive(tmp_path, "--url", server.url, *flags, code=1)["sides"]["endpoint"]
    assert side["errors"] == {"timeout": 1}
    assert side["answered"] == 1


def test_nobody_listening_ends_with_a_clear_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with SseServer().serving() as server:
        url = server.url
    assert serve.main(["--url", url, "--concurrency", "1"]) == 2
    assert f"{url}/v1/models failed" in capsys.readouterr().err


def test_an_answer_of_the_wrong_length_is_flagged_and_not_good(tmp_path: Path) -> None:
    side = run_ways(tmp_path, "short", "fine")
    assert side["answered"] == 2
    assert side["wrong"] == {"answer's tokens differ": 1}


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
    assert side["itl"]["count"] == 2 * 63, "the role is not a token"
    assert side["errors"] == {}


def test_a_closed_loop_keeps_so_many_under_way(tmp_path: Path) -> None:
    with SseServer(begins_at=5).serving() as server:
        drive(tmp_path, "--url", server.url, "--concurrency", "5", "--requests", "10")
    assert server.max_running == 5


@pytest.mark.slow
def test_an_open_loop_sends_when_due_however_slow_the_answers(tmp_path: Path) -> None:
    with SseServer(begins_at=20).serving() as server:
        flags = ("--rate", "500", "--requests", "20")
        side = drive(tmp_path, "--url", server.url, *flags)["sides"]["endpoint"]
    assert server.max_running == 20
    assert side["late"]["count"] == 20


def test_the_committed_trace_plays(tmp_path: Path) -> None:
    trace = Path(__file__).parents[2] / "bench" / "traces" / "conversation_200.jsonl"
    with SseServer().serving() as server:
        flags = ("--trace", str(trace), "--limit", "12", "--scale-lengths", "0.01", "--speed", "1000")
        side = drive(tmp_path, "--url", server.url, *flags)["sides"]["endpoint"]
    assert side["answered"] == 12
    assert side["wrong"] == {}


def test_a_baseline_gets_the_same_load_in_turns_and_ratios_are_written(tmp_path: Path) -> None:
    with SseServer().serving() as ours, SseServer().serving() as theirs:
        flags = ("--concurrency", "1", "--requests", "3", "--rounds", "2", "--output-tokens", "4")
        out = drive(tmp_path, "--url", ours.url, "--baseline-url", theirs.url, *flags)
    prompts = [[body["prompt"] for body in server.bodies] for server in (ours, theirs)]
    assert prompts[0] == prompts[1]
    assert len({tuple(prompt) for prompt in prompts[0]}) == 6, "no round repeats another's content"
    assert out["ratios"]["output_tokens_per_s"] > 0
    assert out["sides"]["baseline"]["answered"] == 6


def test_a_baseline_may_end_without_done_but_not_be_cut(tmp_path: Path) -> None:
    with SseServer().serving() as ours, SseServer("no done", "cut").serving() as theirs:
        flags = ("--concurrency", "1", "--requests", "2", "--rounds", "1", "--output-tokens", "4")
        more = ("--baseline-without-done", "--baseline-extra", '{"ignore_eos": null, "top_k": 1}')
        out = drive(tmp_path, "--url", ours.url, "--baseline-url", theirs.url, *flags, *more, code=1)
    assert out["sides"]["endpoint"]["answered"] == 2
    assert out["sides"]["baseline"]["errors"] == {"cut": 1}
    assert "ignore_eos" not in theirs.bodies[0]
    assert theirs.bodies[0]["top_k"] == 1
    assert ours.bodies[0]["ignore_eos"] is True


def test_good_are_those_within_both_limits_and_in_a_closed_loop_nothing_waits_for_a_place(tmp_path: Path) -> None:
    within = run_ways(tmp_path, *["fine"] * 4, more=("--slo-ttft-ms", "60000", "--slo-tpot-ms", "60000"))
    beyond = run_ways(tmp_path, *["fine"] * 4, more=("--slo-ttft-ms", "0.0001"))
    assert (within["good"], beyond["good"]) == (4, 0)
    assert within["goodput"] == pytest.approx(4 / within["wall_s"])
    assert within["held"]["p99"] == 0.0, "a request is due when there is a place for it"


def test_ratios_are_ours_over_the_baselines_and_none_where_there_is_nothing_to_divide() -> None:
    def side(seconds: float, answered: bool) -> ReplayFigures:
        outcome = Outcome(0.0, 0.0, 4, 2, 3 * seconds, [seconds, 2 * seconds], completion_tokens=2)
        outcome.error = None if answered else "cut"
        target = AnswerTarget(60.0, 60.0)
        return figures_of([outcome], target, 10 * seconds, 0.1, counts_prompts=False, exact=True)

    found = serve.ratios(side(0.5, True), side(1.0, True))
    assert found["ttft_p50"] == found["itl_p99"] == found["answer_p90"] == pytest.approx(0.5)
    assert found["requests_per_s"] == found["goodput"] == pytest.approx(2.0)
    assert set(serve.ratios(side(0.5, True), side(1.0, False)).values()) == {None}


def test_tokens_of_answers_that_failed_count_nowhere() -> None:
    """Neither among those that went in a second, nor as what a cache had."""
    good = Outcome(10, 10, 40, 3, 11.0, [10.2, 10.6, 11.0], prompt_tokens=40, completion_tokens=3, cached_tokens=10)
    cut = Outcome(10, 10, 600, 3, 11.0, [10.5], prompt_tokens=600, completion_tokens=1, cached_tokens=600, error="cut")
    refused = Outcome(10, 10, 900, 3, 10.1, error="http 429")
    target = serve.Target("endpoint", Endpoint.parse("http://127.0.0.1:1"), "m", False, False, {})
    target.outcomes, target.wall_s, target.cpu_s = [cut, good, refused], 2.0, 0.1
    side = target.figures(AnswerTarget(60.0, 60.0))
    assert (side.sent, side.answered, side.good, side.errors) == (3, 1, 1, {"cut": 1, "http 429": 1})
    assert (side.requests_per_s, side.input_tokens_per_s, side.output_tokens_per_s) == (0.5, 20.0, 1.5)
    assert (side.cached_share, side.client_cores) == (0.25, 0.05)
    assert {latencies.count for latencies in (side.ttft, side.tpot, side.answer)} == {1}
    assert side.late.count == 3, "the client's lateness is of all that it sent"


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
