"""Embeddings on real workers: what they are, that their bits hang on the prompt alone, and that a loss costs none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification

from tests.support.checkpoints import Oracle, copy_checkpoint, make_checkpoint
from tests.support.colocated_worker import colocated
from tests.support.stepped_cluster import company
from tests.support.worker_pair import pair
from tests.workers.test_pair import prompts
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.messages.worker_events import Embedding
from twinpool.contracts.sampling_params import CLASSES, JUDGED, SamplingParams

EMBED, MEAN, CLS = (SamplingParams(max_tokens=0, temperature=0.0, pooling=way) for way in ("last", "mean", "cls"))
DRAW = SamplingParams(max_tokens=3, temperature=0.0)
SCORE = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=1)


def test_an_embedding_is_the_last_tokens_hidden_state_behind_the_final_norm(model: Path, oracle: Oracle) -> None:
    asked = prompts(21, 40, 1, 17)
    with pair(model) as both:
        answers = both.run(*[both.submit(prompt, EMBED) for prompt in asked])
    for prompt, answer in zip(asked, answers, strict=True):
        torch.testing.assert_close(torch.tensor(answer.embedding), oracle.hidden(prompt)[-1], rtol=1e-4, atol=1e-4)
        assert answer.done is not None
        assert (answer.done.reason, answer.tokens) == ("length", {})
        assert Role.DECODE not in answer.progress


def test_its_bits_are_those_of_the_prompt_alone_in_a_batch_in_chunks_and_behind_a_prefix(model: Path) -> None:
    (prompt, *others) = prompts(22, 70, 30, 9, 44)
    with pair(model) as both:
        (alone,) = both.run(both.submit(prompt, EMBED))
        (again,) = both.run(both.submit(prompt, EMBED))
        assert again.progress[Role.PREFILL].cached_tokens >= 48, "the prefix is there"
    with pair(model, prefill={"chunk_tokens": 32}) as both:
        (chunked,) = both.run(both.submit(prompt, EMBED))
    with pair(model) as both:
        mixed = [both.submit(others[0], DRAW), both.submit(others[1], EMBED), both.submit(others[2], SCORE)]
        (together, *rest) = both.run(both.submit(prompt, EMBED), *mixed)
        assert [bool(answer.embedding) for answer in rest] == [False, True, False]
    with colocated(model) as one:
        (here,) = one.run(one.submit(prompt, EMBED))
    assert again.embedding == chunked.embedding == together.embedding == here.embedding == alone.embedding != ()
    assert rest[1].embedding != alone.embedding


@pytest.mark.parametrize("how", [EMBED, MEAN], ids=["last", "mean"])
def test_a_prefill_worker_that_is_lost_costs_no_embedding(model: Path, how: SamplingParams) -> None:
    (prompt,) = prompts(23, 90)
    with pair(model) as both:
        (expected,) = both.run(both.submit(prompt, how))
    with company(model, prefills=2, decodes=1, prefill={"chunk_tokens": 32}) as all_of_them:
        rid = all_of_them.submit(prompt, how)
        first = all_of_them.told[rid].request.workers[Role.PREFILL]
        all_of_them.step(first)
        all_of_them.gone(first)
        all_of_them.run(rid)
        told = all_of_them.told[rid]
        assert told.embedding == expected.embedding
        assert len(told.replays) == 1
        assert told.request.workers == {Role.PREFILL: "prefill-1" if first == "prefill-0" else "prefill-0"}


def test_a_worker_that_is_lost_between_the_embedding_and_its_end_has_answered(model: Path) -> None:
    (prompt,) = prompts(24, 20)
    with company(model, prefills=2, decodes=1) as all_of_them:
        rid = all_of_them.submit(prompt, EMBED)
        first = all_of_them.told[rid].request.workers[Role.PREFILL]
        all_of_them.between.append(lambda worker, event: not isinstance(event, Embedding))
        all_of_them.until(lambda: bool(all_of_them.told[rid].embedding), "its embedding")
        all_of_them.between.clear()
        all_of_them.gone(first)
        told = all_of_them.told[rid]
        assert told.done is not None
        assert (told.done.reason, told.replays) == ("length", [])


def test_an_embedding_that_is_made_in_another_way_is_refused(model: Path) -> None:
    with pair(model) as both:
        rid = both.submit([1, 2, 3], SamplingParams(max_tokens=0, temperature=0.0, pooling="weighted"))
        done = both.run(rid)[0].done
    assert done is not None
    assert (done.error, done.message) == (
        ErrorKind.INVALID,
        "prefill-0 embeds by one of last, mean, cls, not by 'weighted'",
    )
    assert rid == RequestId("r1")


def test_a_mean_and_a_first_token_are_those_of_all_hidden_states_whatever_the_chunks_the_batch_and_the_cache(
    model: Path, oracle: Oracle
) -> None:
    asked = prompts(27, 70, 1, 33)
    with pair(model) as both:
        means = both.run(*[both.submit(prompt, MEAN) for prompt in asked])
        firsts = both.run(*[both.submit(prompt, CLS) for prompt in asked])
        (behind,) = both.run(both.submit(asked[0], EMBED))
        assert behind.progress[Role.PREFILL].cached_tokens >= 48, "others use what a mean has computed"
        again = both.run(both.submit(asked[0], MEAN), both.submit(asked[0], CLS))
        assert [one.progress[Role.PREFILL].cached_tokens for one in again] == [0, 0], "they need every position"
    for prompt, mean, first in zip(asked, means, firsts, strict=True):
        hidden = oracle.hidden(prompt)
        torch.testing.assert_close(torch.tensor(mean.embedding), hidden.mean(0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.tensor(first.embedding), hidden[0], rtol=1e-4, atol=1e-4)
    assert [one.embedding for one in again] == [means[0].embedding, firsts[0].embedding]
    for chunk in (16, 48):
        with pair(model, prefill={"chunk_tokens": chunk}) as both:
            mixed = [both.submit(asked[0], EMBED), both.submit(asked[2], CLS), both.submit(asked[0], MEAN)]
            mixed.append(both.submit(asked[0], CLS))
            _, _, mean, first = both.run(*mixed)
        assert (mean.embedding, first.embedding) == (means[0].embedding, firsts[0].embedding)


def test_a_mean_goes_through_the_dense_modules_of_the_checkpoint(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """As sentence-transformers defines them: an activation of a linear layer, one after the other."""
    generator = torch.Generator().manual_seed(1)
    sizes, tanhs = [(48, 64, True), (20, 48, False)], [True, False]
    kinds = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
    folder = copy_checkpoint(model, tmp_path / "embedder")
    listed = [{"type": f"sentence_transformers.models.{kind}", "path": f"{n}_{kind}"} for n, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (prompt,) = prompts(29, 40)
    expected = oracle.hidden(prompt).mean(0)
    for number, ((outputs, inputs, bias), tanh) in enumerate(zip(sizes, tanhs, strict=True), 2):
        linear = torch.nn.Linear(inputs, outputs, bias=bias)
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            expected = torch.tanh(linear(expected)) if tanh else linear(expected)
        dense = folder / f"{number}_Dense"
        dense.mkdir()
        save_file(
            {f"linear.{name}": one.detach() for name, one in linear.named_parameters()}, dense / "model.safetensors"
        )
        activation = f"torch.nn.modules.{'activation.Tanh' if tanh else 'linear.Identity'}"
        told = {"in_features": inputs, "out_features": outputs, "bias": bias, "activation_function": activation}
        (dense / "config.json").write_text(json.dumps(told))
    pooling = read_model_spec(folder).pooling
    assert (pooling.asked, pooling.normalise, pooling.refusal) == ("mean+dense", True, "")
    with pair(folder) as both:
        (answer,) = both.run(both.submit(prompt, replace(MEAN, pooling=pooling.asked)))
    torch.testing.assert_close(torch.tensor(answer.embedding), expected, rtol=1e-4, atol=1e-4)
    assert read_model_spec(folder).fingerprint != read_model_spec(model).fingerprint


@pytest.mark.parametrize(("kind", "labels"), [("qwen3", 1), ("llama", 3)])
def test_a_head_for_classes_gives_the_logits_of_transformers_own_class(kind: str, labels: int, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", kind, seed=4)
    torch.manual_seed(5)
    own = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels, dtype=torch.float32)
    own.save_pretrained(tmp_path / "classes")
    asked, params = prompts(30, 60, 1, 33), SamplingParams(max_tokens=0, temperature=0.0, pooling=CLASSES)
    assert read_model_spec(tmp_path / "classes").pooling.labels == tuple(f"LABEL_{n}" for n in range(labels))
    with pair(tmp_path / "classes", prefill={"chunk_tokens": 32}) as both:
        answers = both.run(*[both.submit(prompt, params) for prompt in asked])
        (again,) = both.run(both.submit(asked[0], params))
        assert again.progress[Role.PREFILL].cached_tokens >= 48, "the prefix is there"
    assert again.embedding == answers[0].embedding
    for prompt, answer in zip(asked, answers, strict=True):
        with torch.no_grad():
            (want,) = own(torch.tensor([prompt])).logits
        torch.testing.assert_close(torch.tensor(answer.embedding), want, rtol=1e-4, atol=1e-4)
        assert Role.DECODE not in answer.progress


def test_a_judgement_is_the_logits_of_its_tokens_alone_in_a_batch_and_behind_a_prefix(
    model: Path, oracle: Oracle
) -> None:
    ids = (7, 40)
    judge = SamplingParams(max_tokens=0, temperature=0.0, pooling=JUDGED, allowed_token_ids=ids)
    asked = prompts(26, 60, 33)
    with pair(model, prefill={"chunk_tokens": 32}) as both:
        answers = both.run(*[both.submit(prompt, judge) for prompt in asked], both.submit(asked[0], EMBED))
        (again,) = both.run(both.submit(asked[0], judge))
        assert again.progress[Role.PREFILL].cached_tokens >= 48, "the prefix is there"
    with pair(model) as both:
        (whole,) = both.run(both.submit(asked[0], judge))
    assert again.embedding == answers[0].embedding == whole.embedding
    assert len(answers[2].embedding) > 2, "an embedding in the same batch stays one"
    for prompt, answer in zip(asked, answers, strict=False):
        want = oracle.logits(prompt)[-1, list(ids)]
        torch.testing.assert_close(torch.tensor(answer.embedding), want, rtol=1e-4, atol=1e-4)
        assert Role.DECODE not in answer.progress


@pytest.mark.parametrize(
    ("params", "value"), [(EMBED, float("nan")), (EMBED, float("inf")), (MEAN, float("nan")), (MEAN, -(2.0**13))]
)
def test_an_embedding_that_is_no_numbers_fails_its_request_alone(
    model: Path, params: SamplingParams, value: float
) -> None:
    good, bad = prompts(25, 20, 24)
    with pair(model) as both:
        decoder = both.prefill._engine.decoder
        plain = decoder.norm

        def norm(x_nh: torch.Tensor) -> torch.Tensor:
            normed_nh = plain(x_nh).clone()
            if len(normed_nh) != len(good):
                normed_nh[-1, 0] = value
            return normed_nh

        decoder.norm = norm
        fine, broken = both.run(both.submit(good, params), both.submit(bad, params))
    assert fine.done is not None
    assert broken.done is not None
    assert (fine.done.error, broken.done.error) == (None, ErrorKind.NONFINITE)
