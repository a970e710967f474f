"""Every family with 1, 2 and 4 tensor-parallel ranks on either side: the oracle's tokens, handed over between all.
Mixtures with experts that are divided and spread, in turns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import Oracle, compare
from tests.support.model_families import EVERY
from tests.support.rank_followers import RankProcesses, rank_processes
from tests.support.worker_pair import pair
from tests.workers.test_pair import greedy, prompts
from twinpool.cluster.serve.preflight import divides
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.config.load_config import config_from_dict

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

PAIRS = [(p, d) for p, d in itertools.product((1, 2, 4), repeat=2) if (p, d) != (1, 1)]


@pytest.fixture(scope="module")
def warm() -> Iterator[RankProcesses]:
    with rank_processes() as processes:
        yield processes


def _sizes(folder: Path) -> list[tuple[int, int]]:
    """Those that the checkpoint's heads allow."""
    spec, config = read_model_spec(folder), config_from_dict({})
    good = {size for size in (1, 2, 4) if not divides(config, spec, size)}
    return [sizes for sizes in PAIRS if good.issuperset(sizes)]


@pytest.mark.parametrize("name", list(EVERY))
def test_ranks_of_any_number_give_the_tokens_of_one(name: str, warm: RankProcesses, tmp_path: Path) -> None:
    folder = EVERY[name](tmp_path / "model")
    oracle = Oracle(folder)
    asked = prompts(4, 1, 17, 70, 150)
    asked.append(asked[-1][:96] + asked[1])
    sizes, spec = _sizes(folder), read_model_spec(folder)

    def spread(size: int, turn: int) -> int:
        return size if turn % 3 and not divides(config_from_dict({}), spec, size, size) else 1

    assert (2, 2) in sizes, "the fixture has heads for two ranks"
    for number, (p, d) in enumerate(sizes):
        plane = ("shm", "zmq")[number % 2]
        sections: dict[str, Any] = {
            "transfer": {"plane": plane},
            "prefill": {"chunk_tokens": 64, "tp": p, "ep": spread(p, number)},
            "decode": {"tp": d, "ep": spread(d, number + 1)},
        }
        with pair(folder, tokens=2048, ranks=warm, **sections) as both:
            answers = both.run(*[both.submit(prompt, greedy(8)) for prompt in asked])
        for prompt, answer in zip(asked, answers, strict=True):
            verdict = compare(oracle, prompt, answer.list)
            assert verdict.equal, (p, d, plane, verdict)
