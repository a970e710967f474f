"""`twinpool plan`: from a file of costs and a trace to pools, and the calibration's own arithmetic."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench.sse_server import SseServer
from twinpool.cli import command_line
from twinpool.cli import commands as cli
from twinpool.cli.load.measure_costs import ROWS, ClusterProbes, ProbeFailed, find_endpoint, token_time
from twinpool.cli.load.open_loop import Content
from twinpool.cli.load.openai_client import Outcome
from twinpool.sim.fabric.virtual_time import StepCosts
from twinpool.sim.scale.cluster_plan import MeasuredCosts, read_costs

QUICK = StepCosts(0.25, 0.0, 0.0, 0.01, 0.0, 0.0, handover_base_s=0.001, handover_token_s=0.0, message_s=0.0)
"""A prompt takes a quarter of a second, however long; a token 10 ms."""


def plan(*arguments: str) -> int:
    return cli.run(command_line.parser().parse_args(["plan", *arguments]))


def costs(folder: Path, of: StepCosts = QUICK, chunk: int = 512) -> str:
    path = folder / "costs.json"
    MeasuredCosts("demo", "here", "now", of, chunk, 16, 64, 1 << 14, 1 << 14, 1536).write(path)
    return str(path)


def trace(folder: Path, count: int, gap_s: float, prompt: int = 512, answer: int = 10) -> str:
    """Requests at even distances, none with anything in common."""
    path = folder / "trace.jsonl"
    lines = (
        {"timestamp": 1000 * gap_s * n, "input_length": prompt, "output_length": answer, "hash_ids": [n]}
        for n in range(count)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.slow
def test_pools_are_as_large_as_the_load_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Ten prompts a second of a quarter of a second each keep two and a half workers busy.
    words = ["--trace", trace(tmp_path, 80, 0.1), "--costs", costs(tmp_path), "--slo", "ttft=1,itl=0.05"]
    assert plan(*words, "--json", str(tmp_path / "plan.json")) == 0
    chosen = json.loads((tmp_path / "plan.json").read_text())["chosen"]
    assert (chosen["prefill"], chosen["decode"]) == (3, 1)
    assert chosen["report"]["good"] == 1.0
    assert chosen["report"]["itl_p50_s"] == pytest.approx(0.01, rel=0.01)
    said = capsys.readouterr().out
    assert "twinpool serve --prefill 3 --decode 1" in said
    assert "first tokens late" in said, "two would be too few, and the table says why"


def test_a_target_that_no_pools_keep_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--trace", trace(tmp_path, 20, 0.5), "--costs", costs(tmp_path), "--max-workers", "4"]
    assert plan(*words, "--slo", "ttft=1,itl=0.001") == 1
    said = capsys.readouterr().out
    assert "NO POOLS of up to 4 workers each" in said
    assert "too slow from token to token" in said


def test_costs_that_explain_badly_what_was_measured_are_not_to_be_believed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--trace", trace(tmp_path, 4, 1.0), "--costs", costs(tmp_path)]
    assert plan(*words) == 0
    assert "DON'T BELIEVE IT" not in capsys.readouterr().out
    doubtful = replace(read_costs(tmp_path / "costs.json"), batch_error=0.57)
    doubtful.write(tmp_path / "costs.json")
    assert plan(*words) == 0
    assert "DON'T BELIEVE IT: the costs are 0% off the first tokens" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "give --trace FILE to plan for, --measure, or both"),
        (["--trace", "x", "--model", "demo"], "say what --measure measures"),
        (["--measure", "--url", "http://a:1", "--model", "demo"], "leave out --model"),
        (["--trace", "/nowhere"], "/nowhere"),
        (["--trace", "x", "--share", "2"], "--share must be above 0"),
        (["--trace", "x", "--max-workers", "0"], "--max-workers must be above 0"),
        (["--trace", "x", "--slo", "e2e=1"], "--slo takes"),
        (["--measure", "--token-range", "9"], "--token-range takes"),
    ],
)
def test_wrong_flags_are_refused(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*flags) == 2
    assert words in capsys.readouterr().err


def test_without_costs_the_command_says_how_to_have_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--trace", trace(tmp_path, 2, 1.0), "--costs", str(tmp_path / "none.json")) == 2
    assert "twinpool plan --measure" in capsys.readouterr().err


def answer(begin: float, gap: float, events: int, each: int = 1) -> Outcome:
    arrivals = [begin + gap * number for number in range(events)]
    return Outcome(0.0, 0.0, 1, events * each, arrivals[-1], arrivals, 1, 0, events * each)


def test_a_batch_is_measured_while_all_of_it_runs() -> None:
    assert token_time([answer(0.0, 0.01, 100)]) == pytest.approx(0.01)
    # The second begins late: what the first was quicker by alone isn't counted.
    first = Outcome(
        0.0, 0.0, 1, 130, 0.0, [0.001 * n for n in range(50)] + [1 + 0.02 * n for n in range(80)], 1, 0, 130
    )
    assert token_time([first, answer(0.98, 0.02, 80)]) == pytest.approx(0.02, rel=0.05)
    # And once the other has ended: what is quicker alone isn't counted either.
    alone = [0.02 * n for n in range(80)] + [1.58 + 0.001 * n for n in range(1, 200)]
    last = Outcome(0.0, 0.0, 1, len(alone), alone[-1], alone, 1, 0, len(alone))
    for batch in ([last, answer(0.0, 0.02, 80)], [answer(0.0, 0.02, 80), last]):
        assert token_time(batch) == pytest.approx(0.02, rel=0.05)
    assert token_time([answer(0.0, 0.01, 100, each=4)]) == pytest.approx(0.0025), "drafts come several in an event"
    assert token_time([answer(0.0, 0.01, 20), answer(0.19, 0.01, 100)]) is None


def probed(server: SseServer, say: list[str]) -> tuple[list[Any], list[Any]]:
    async def run() -> tuple[list[Any], list[Any]]:
        endpoint, model, context = await find_endpoint(server.url, "key")
        probes = ClusterProbes(endpoint, model, context, Content(7, 300, 2000), say.append)
        return await probes.prompts(), await probes.batches()

    return asyncio.run(run())


def test_the_calibration_asks_prompts_alone_and_answers_together() -> None:
    said: list[str] = []
    with SseServer().serving() as server:
        prompts, batches = probed(server, said)
    assert [probe.tokens for probe in prompts if probe.prompts == 1] == [16, 64, 256, 504]
    assert [(probe.prompts, probe.tokens) for probe in prompts[4:]] == [(2, 504), (4, 504), (8, 504)]
    assert {probe.context for probe in batches} <= {128, 320}
    assert len(said) == len(prompts) + len(batches)
    whole = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(whole)) == len(whole), "no prompt is another's"
    begun = Counter((len(prompt), prompt[: len(prompt) // 2]) for prompt in whole)
    together = {length: count for (length, _), count in begun.items() if count > 1}
    assert together == {64: 1 + sum(ROWS), 256: 1 + sum(ROWS)}, "what is common is computed before a batch is"
    assert all(len(body["prompt"]) + body["max_tokens"] <= 512 for body in server.bodies)
    assert all("Bearer key" in head for head in server.heads)


def test_a_calibration_whose_requests_fail_ends_with_the_reason() -> None:
    for way, words in (("short", "7 tokens and not 8"), ("refused", "http 429"), ("cut", "cut")):
        with SseServer(way).serving() as server, pytest.raises(ProbeFailed, match=words):
            probed(server, [])
    with pytest.raises(ProbeFailed, match="failed"):
        asyncio.run(find_endpoint("http://127.0.0.1:1", ""))
