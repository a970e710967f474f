"""Workers of several ranks that go on in each other's role: each rank keeps its part of the model."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import Oracle, compare, make_checkpoint
from tests.support.rank_followers import RankProcesses, Warm, group_of, rank_processes
from tests.support.worker_pair import Pair, counts_for
from twinpool.cluster.worker_process.worker_plan import WorkerPlan
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import PAIR, Incarnation, Role, WorkerName
from twinpool.contracts.messages.rank_orders import LeaveRole
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.runner.load_model import KeptModel

TOKENS = 1024
PROMPT = [5, 99, 7, 250, 31, 12, 8, 77, 140, 3]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
DRAWN = SamplingParams(max_tokens=6, temperature=0.9, seed=11, repetition_penalty=1.3)


@dataclass
class Noted(RankProcesses):
    """Notes which processes are followers, in order."""

    processes: RankProcesses = field(default_factory=RankProcesses)
    taken: list[Warm] = field(default_factory=list)

    def take(self, count: int) -> list[Warm]:
        taken = self.processes.take(count)
        self.taken += taken
        return taken

    def give(self, warm: Warm) -> str:
        return self.processes.give(warm)


@pytest.mark.slow
def test_ranks_go_on_together_with_their_parts_of_the_model(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3", seed=23)
    sections: dict[str, Any] = {"transfer": {"plane": "shm"}, "engine": {"threads": 1}}
    config = config_from_dict(sections | {role: {"tp": 2} for role in PAIR})
    counts = {role: counts_for(folder, config, role, TOKENS) for role in PAIR}
    crews, said, models = Noted(), list[list[list[int]]](), [KeptModel(), KeptModel()]
    with ExitStack() as stack:
        crews.processes = stack.enter_context(rank_processes())
        groups = [stack.enter_context(group_of(crews, folder, role, config, counts[role])) for role in PAIR]
        for at in ({Role.PREFILL: 0, Role.DECODE: 1}, {Role.PREFILL: 1, Role.DECODE: 0}):
            if said:
                for group in groups:
                    assert group is not None
                    assert group.line.ask(LeaveRole()).wait() == [True], "the other rank has closed all it had"
                for role, which in at.items():
                    name, share = WorkerName(f"{role}-0"), counts[role]
                    plan = WorkerPlan(
                        name, role, Incarnation(2), folder, config, share, "127.0.0.1", "", folder, rank=1
                    )
                    crews.taken[which].pipe.send(plan)
            crew = {role: groups[which] for role, which in at.items()}
            kept = {role: models[which] for role, which in at.items()}
            both = Pair(folder, config, TOKENS, SystemClock(), groups=crew, kept=kept)
            try:
                said.append([both.run(both.submit(PROMPT, sampling))[0].list for sampling in (GREEDY, DRAWN)])
                both.settle()
            finally:
                both.prefill.close()
                both.decode.close()
    assert said[0] == said[1]
    assert compare(Oracle(folder), PROMPT, said[0][0]).equal
    assert [model.loads for model in models] == [1, 1]
