"""The experts that tokens go to, told with their log-probabilities: those that transformers' routers choose, for every
position of prompt and answer but the last, whatever happens to the request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.checkpoints import Oracle
from tests.support.colocated_worker import colocated
from tests.support.model_families import FAMILIES
from tests.support.rank_followers import RankProcesses
from tests.support.stepped_cluster import company, generated
from tests.support.worker_pair import Answer, pair
from tests.workers.test_drafts import DRAFTS, FEW
from tests.workers.test_pair import prompts
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import Role
from twinpool.contracts.sampling_params import SamplingParams, TokenLogprob

COUNT = 16
ASKED = SamplingParams(max_tokens=COUNT, temperature=0.9, seed=5).with_experts()
UNASKED = SamplingParams(max_tokens=COUNT, temperature=0.9, seed=6, logprobs=1)
Experts = np.ndarray[Any, np.dtype[np.uint16]]
"""[positions, layers, k], the ids of a layer in ascending order."""


class Routers(Oracle):
    """transformers, and what its routers choose."""

    @torch.inference_mode()
    def experts(self, tokens: Sequence[int]) -> Experts:
        """Of each of `tokens`."""
        chosen: list[torch.Tensor] = []
        modules = [module for module in self.model.modules() if type(module).__name__.endswith("Experts")]
        hooks = [module.register_forward_pre_hook(lambda _, given: chosen.append(given[1])) for module in modules]
        self.model(torch.tensor([list(tokens)]))
        for hook in hooks:
            hook.remove()
        assert len(chosen) == len(modules) > 0
        return torch.stack(chosen, 1).sort(-1).values.numpy().astype(np.uint16)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("routed")
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = FAMILIES[family](root / family, published=True)
        return made[family]

    return folder


def experts_of(told: Sequence[TokenLogprob]) -> Experts:
    rows = []
    for one in told:
        assert one.experts is not None
        rows.append(np.frombuffer(one.experts.ids, "<u2").reshape(-1, one.experts.top_k))
    return np.sort(np.stack(rows), -1)


def expect_the_routers(folder: Path, prompt: Sequence[int], told: Sequence[TokenLogprob]) -> None:
    """`told`: of each token of the prompt but the first, and of each of the answer."""
    tokens = [*prompt, *(one.token for one in told[len(prompt) - 1 :])]
    assert [one.token for one in told] == tokens[1:]
    np.testing.assert_array_equal(experts_of(told), Routers(folder).experts(tokens[:-1]))


def whole(answer: Answer) -> list[TokenLogprob]:
    return [*answer.scores, *(answer.logprobs[position] for position in sorted(answer.logprobs))]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_experts_are_the_routers_of_transformers_in_chunks_batches_and_behind_a_prefix(
    folder_of: Callable[[str], Path], family: str
) -> None:
    folder = folder_of(family)
    asked, other = prompts(41, 70, 9, 33), prompts(42, 40)
    with pair(folder, prefill={"chunk_tokens": 32}) as both:
        unasked = both.submit(other[0], UNASKED)
        answers = both.run(*[both.submit(prompt, ASKED) for prompt in asked])
        (again,) = both.run(both.submit(asked[0], ASKED))
        (plain,) = both.run(unasked)
    assert again.progress[Role.PREFILL].cached_tokens == 0, "experts come with the computation"
    assert whole(again) == whole(answers[0])
    assert all(one.experts is None for one in plain.logprobs.values())
    for prompt, answer in zip(asked, answers, strict=True):
        assert len(answer.logprobs) == COUNT
        expect_the_routers(folder, prompt, whole(answer))


def test_experts_are_told_though_the_request_leaves_decode_and_comes_back(folder_of: Callable[[str], Path]) -> None:
    folder, (prompt,) = folder_of("qwen3_moe"), prompts(43, 40)
    with pair(
        folder, decode={"retract": "copy", "cache": {"host_bytes": 1 << 23}}, faults={"retract_every": 5}
    ) as both:
        (answer,) = both.run(both.submit(prompt, ASKED))
        assert both.decode.status().counters["retractions"] > 0
    expect_the_routers(folder, prompt, whole(answer))


@pytest.mark.slow
def test_experts_are_told_though_the_decode_worker_is_lost(folder_of: Callable[[str], Path]) -> None:
    """What was told before the loss isn't computed again, and what comes after it has its own."""
    folder, (prompt,) = folder_of("qwen3_moe"), prompts(44, 50)
    with company(folder, prefills=1, decodes=2) as all_of_them:
        rid = all_of_them.submit(prompt, ASKED)
        all_of_them.until(generated(all_of_them, rid, 7), "some tokens")
        all_of_them.gone(all_of_them.told[rid].request.workers[Role.DECODE])
        all_of_them.run(rid)
        told = all_of_them.told[rid]
        assert len(told.replays) == 1
    assert len(told.logprobs) == COUNT
    tokens = [*prompt, *(one.token for one in told.logprobs)]
    wanted = Routers(folder).experts(tokens[:-1])[len(prompt) - 1 :]
    np.testing.assert_array_equal(experts_of(told.logprobs), wanted)


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("made_by", ["", "mtp"], ids=["looked up", "made by a mixture of their own"])
def test_experts_come_with_drafts_that_are_drawn(folder_of: Callable[[str], Path], made_by: str) -> None:
    folder, again = folder_of("glm4_moe" if made_by else "qwen3_moe"), list(FEW) * 8
    greedy = SamplingParams(max_tokens=40, temperature=0.0, allowed_token_ids=FEW).with_experts()
    with pair(folder, decode=DRAFTS, engine={"draft_model": made_by}) as both:
        (answer,) = both.run(both.submit(again, greedy))
        counters = both.decode.status().counters
        assert counters["drafts_accepted"] > 0
    expect_the_routers(folder, again, whole(answer))


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [({"tp": 2}, {}), ({"tp": 2, "ep": 2}, {"tp": 2, "ep": 2}), ({"dp": 2}, {"dp": 2})],
    ids=["divided", "spread over ranks", "spread over workers"],
)
def test_experts_are_those_of_the_checkpoint_however_layers_and_experts_are_laid_out(
    folder_of: Callable[[str], Path], warm: RankProcesses, prefill: dict[str, int], decode: dict[str, int]
) -> None:
    folder, asked = folder_of("qwen3_moe"), prompts(47, 70, 9)
    with pair(
        folder,
        tokens=2048,
        ranks=warm,
        prefill={"chunk_tokens": 32, **prefill},
        decode=dict(decode),
        transfer={"plane": "shm"},
    ) as both:
        rids = [both.submit(prompt, ASKED) for prompt in asked]
        both.submit(prompts(48, 20)[0], UNASKED)
        answers = both.run(*rids)
    for prompt, answer in zip(asked, answers, strict=True):
        expect_the_routers(folder, prompt, whole(answer))


def test_experts_are_told_by_a_worker_of_both_roles(folder_of: Callable[[str], Path]) -> None:
    folder, asked = folder_of("qwen3_moe"), prompts(45, 30, 12)
    with colocated(folder) as one:
        answers = one.run(*[one.submit(prompt, ASKED) for prompt in asked])
    for prompt, answer in zip(asked, answers, strict=True):
        expect_the_routers(folder, prompt, whole(answer))


def test_a_model_without_experts_refuses_by_the_fields_name(model: Path) -> None:
    with pair(model) as both:
        (answer,) = both.run(both.submit(prompts(46, 9)[0], ASKED))
    assert answer.done is not None
    assert answer.done.error is ErrorKind.INVALID
    assert "return_routed_experts: this model has no mixture of experts" in answer.done.message
