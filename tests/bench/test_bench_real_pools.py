"""The bench of pools of real workers that follow the load: what it replays, and what it makes of what it sees."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import pytest

from bench.autoscaling.real_pools import pairs
from tests.bench.sse_server import SseServer
from tests.support.compared_pools import figures_of, unlike
from tests.support.phased_replay import Lengths, Phase, PoolWatch, Replayed, asks_in_phases, spread
from twinpool.cli.load.openai_client import Endpoint, Outcome, stream
from twinpool.sim.scale.traffic import TRACE_BLOCK_TOKENS, TraceLine

LINES = [TraceLine(at, 2 * TRACE_BLOCK_TOKENS, 100, (1, number)) for number, at in enumerate((0.0, 0.0, 3.0, 6.0), 2)]


def row(name: str, role: str, state: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "role": role, "state": state, "waits": "", "last_end": "", **more}


def told(prefill: int, decode: int, *decisions: tuple[float, str], **counters: int) -> dict[str, Any]:
    pools = [{"role": "prefill", "wanted": prefill}, {"role": "decode", "wanted": decode}]
    return {
        "pools": pools,
        "decisions": [{"ago_s": ago, "text": text} for ago, text in decisions],
        "counters": counters,
    }


def test_who_is_due_at_one_time_is_spread_until_the_next_and_the_last_as_the_one_before() -> None:
    assert [line.at_s for line in spread(LINES)] == [0.0, 1.5, 3.0, 6.0]
    assert [line.at_s for line in spread([*LINES, LINES[3]])] == [0.0, 1.5, 3.0, 6.0, 7.5]


def test_phases_follow_each_other_and_each_round_has_content_of_its_own() -> None:
    lengths = Lengths(prompts=1 / 64, answers=0.1, most=64)
    asks = asks_in_phases(LINES, [Phase(8.0, 2.0), Phase(3.0, 1.0, 2.0)], lengths)
    assert [ask.at_s for ask in asks] == [0.0, 0.0, 1.5, 3.0, 4.0, 4.0, 5.5, 7.0, 8.0, 8.0]
    assert [ask.output_tokens for ask in asks] == [10] * 8 + [20] * 2
    assert (len(asks[0].tokens), len(asks[8].tokens)) == (16, 8)
    assert asks[0].tokens[:8] == asks[1].tokens[:8] != asks[4].tokens[:8], "shared in a round, new in the next"
    assert asks == asks_in_phases(LINES, [Phase(8.0, 2.0), Phase(3.0, 1.0, 2.0)], lengths)


def test_a_watch_adds_up_the_seconds_of_workers_that_are_there_until_the_phases_are_over() -> None:
    watch = PoolWatch(until_s=10.0)
    ready = [row("prefill-0", "prefill", "ready"), row("decode-0", "decode", "ready")]
    waits = row("decode-2", "decode", "starting", waits="a node with a place")
    watch.take(0.0, {"workers": ready})
    watch.take(4.0, {"workers": [*ready, row("decode-1", "decode", "starting"), waits]})
    drains = row("decode-1", "decode", "draining")
    watch.take(6.0, {"workers": [*ready, drains]})
    watch.take(7.0, {"workers": [row(one["name"], one["role"], "unreachable") for one in ready] + [drains]})
    watch.take(9.0, {"workers": [*ready, row("decode-1", "decode", "left")]})
    watch.take(15.0, {"workers": ready})
    assert watch.worker_s == 4 * 2 + 2 * 3 + 3 * 3 + 1 * 2
    assert watch.sizes == [(0.0, 1, 1)]
    assert watch.drain_s == {"decode-1": 3.0}
    assert not watch.ends


def test_a_watch_tells_turns_by_pool_and_each_decision_once() -> None:
    watch = PoolWatch()
    grew, shrank = "decode 1 -> 2 (decode-1 starts): late", "decode 2 -> 1 (decode-1 drains): enough"
    for at, prefill, decode, decisions in (
        (0.0, 1, 1, []),
        (10.0, 1, 2, [(1.0, grew)]),
        (11.0, 2, 2, [(3.0, grew)]),
        (50.0, 2, 1, [(1.0, shrank), (41.0, grew)]),
        (60.0, 2, 2, [(0.0, grew), (11.0, shrank), (51.0, grew)]),
    ):
        ready = [row(f"prefill-{n}", "prefill", "ready") for n in range(prefill)]
        ready += [row(f"decode-{n}", "decode", "ready") for n in range(decode)]
        watch.take(at, {"workers": ready, "autoscaler": told(prefill, decode, *decisions, grown=2)})
    assert watch.steps(1) == [(10.0, 1), (50.0, -1), (60.0, 1)]
    assert watch.turns() == [40.0, 10.0]
    assert [(round(at), text) for at, text in watch.decisions] == [(9, grew), (49, shrank), (60, grew)]
    assert watch.counters == {"grown": 2}


def answered(at_s: float, ttft_s: float, *gaps_s: float, tokens: tuple[int, ...] = (1, 2)) -> Outcome:
    out = Outcome(at_s, at_s, 8, len(tokens), prompt_tokens=8, completion_tokens=len(tokens), token_ids=list(tokens))
    out.arrivals_s = [at_s + ttft_s + sum(gaps_s[:n]) for n in range(len(gaps_s) + 1)]
    out.end_s = out.arrivals_s[-1]
    return out


def test_figures_count_who_came_in_time_of_all_and_everyone_who_did_not_come_whole() -> None:
    lost = Outcome(0.0, 0.0, 8, 2, end_s=1.0, error="cut")
    short = answered(0.0, 1.0, tokens=(1,))
    short.wanted_tokens = 2
    run = Replayed([answered(0.0, 1.0, 0.1), answered(0.0, 9.0, 0.5), lost, short], PoolWatch(), 0.5)
    found = figures_of("1 + 1", run, 10.0)
    assert (found.first_met, found.gaps_met, found.goodput) == (0.5, 0.5, 0.2)
    assert found.failed == {"cut": 1, "answer's tokens differ": 1}


def test_answers_of_two_runs_are_compared_token_by_token() -> None:
    one, other = answered(0.0, 1.0, 0.1), answered(5.0, 2.0, 0.1, tokens=(1, 3))
    lost = Outcome(0.0, 0.0, 8, 2, end_s=1.0, error="cut")
    assert unlike([one, one], [one, other]) == 1
    assert unlike([one, lost], [one, other]) == 0, "who failed is counted elsewhere"
    nothing = answered(0.0, 1.0, 0.1)
    nothing.token_ids = []
    assert unlike([nothing], [nothing]) == 1, "answers without tokens were not compared"


@pytest.mark.parametrize("way", ["fine", "in one piece"])
def test_the_client_keeps_the_tokens_that_it_asked_for(way: str) -> None:
    with SseServer(way).serving() as server:
        endpoint = Endpoint.parse(server.url)
        for asked, tokens in (({"return_token_ids": True}, [0, 1, 2, 3]), ({}, [])):
            request = endpoint.encode("/v1/completions", {"prompt": [1], "max_tokens": 4, "stream": True, **asked})
            outcome = asyncio.run(stream(endpoint, request, Outcome(0.0, 0.0, 1, 4), 20.0))
            assert (outcome.error, outcome.token_ids) == (None, tokens)


def test_sizes_are_pairs_of_workers() -> None:
    assert pairs("1+1,3+2") == [(1, 1), (3, 2)]
    for wrong in ("", "1", "0+1", "1+a"):
        with pytest.raises(argparse.ArgumentTypeError, match="PREFILL"):
            pairs(wrong)
