"""A complaint of other systems' users: after some hundred requests under load half of the answers are wrong
(sglang#23020), and aborted prefills answer garbage (sglang#30233). Here the last are those of a quiet machine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.worker_pair import pair
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.sampling_params import SamplingParams

REQUESTS = 120
WAVE = 12
"""Requests that are in flight at the same time."""


@pytest.mark.slow
def test_answers_after_hundreds_of_requests_under_load_are_those_of_a_quiet_machine(tmp_path: Path) -> None:
    """Common beginnings, choices, aborts in every phase, tight pools, retracts; each answer compared, first to last."""
    folder = make_checkpoint(tmp_path / "m", "qwen3", layers=1, eos=None)
    rng = random.Random(17)
    systems = [[rng.randrange(300) for _ in range(n)] for n in (16, 48, 90)]
    asked: list[tuple[list[int], SamplingParams]] = []
    for number in range(REQUESTS):
        if asked and rng.random() < 0.25:
            prompt = asked[-1][0]
        else:
            prompt = [*rng.choice(systems), *(rng.randrange(300) for _ in range(rng.randrange(1, 60)))]
        temperature = rng.choice([0.0, 1.0])
        asked.append((prompt, SamplingParams(max_tokens=rng.randrange(2, 14), temperature=temperature, seed=number)))
    with pair(folder, cache={"prefix_reuse": False}) as quiet:
        want = [quiet.run(quiet.submit(prompt, params))[0].list for prompt, params in asked]

    sizes = {Role.PREFILL: 640, Role.DECODE: 512}
    sections: dict[str, Any] = {
        "prefill": {"chunk_tokens": 48}, "decode": {"retract": "copy", "first_answer_tokens": 4},
        "cache": {"host_bytes": 1 << 23}, "faults": {"retract_every": 9},
    }  # fmt: skip
    with pair(folder, tokens=sizes, settle=False, **sections) as loaded:
        here: dict[RequestId, int] = {}
        cancelled: set[int] = set()
        coming = list(range(REQUESTS))
        for turn in range(20_000):
            busy = [rid for rid in here if loaded.answers[rid].done is None and here[rid] not in cancelled]
            while coming and len(busy) < WAVE:
                prompt, params = asked[coming[0]]
                busy.append(loaded.submit(prompt, params))
                here[busy[-1]] = coming.pop(0)
            if not busy:
                break
            if rng.random() < 0.1:
                gone = rng.choice(busy)
                cancelled.add(here[gone])
                loaded.cancel(gone)
            loaded.step()
            if turn % 40 == 0:
                assert loaded.decode.check().violations == loaded.prefill.check().violations == ()
        wrong = [
            here[rid]
            for rid, answer in loaded.answers.items()
            if here[rid] not in cancelled and answer.list != want[here[rid]]
        ]
        assert not wrong
        counters = loaded.decode.status().counters
        assert len(cancelled) > 10
        assert counters["retractions"] > 20
