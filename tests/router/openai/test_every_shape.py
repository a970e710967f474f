"""What all endpoints share: each field of a body is in the request that is made of it, and writers say of several
prompts what is so of each. In one process, without a server."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace as with_fields

from tests.router.http_server import DEMO, demo_spec
from twinpool.contracts.checkpoint.model_spec import DenseModule, Pooling
from twinpool.contracts.compact_json import joined
from twinpool.contracts.errors import RequestError
from twinpool.contracts.sampling_params import AdapterRef, TokenLogprob
from twinpool.router.openai.parse_request import (
    EmbeddingFormat,
    GenerateRequest,
    PairFormat,
    read_chat,
    read_completion,
)
from twinpool.router.openai.pooled_answers import (
    EmbeddingWriter,
    PairWriter,
    read_classify,
    read_embeddings,
    read_rerank,
    read_score,
)
from twinpool.router.openai.token_answers import TokenWriter, read_generate
from twinpool.router.text.tokenizer import read_model_tokenizer

SPEC, TOKENIZER = demo_spec(), read_model_tokenizer(DEMO, 100_000)
ADAPTERS = {"mine": AdapterRef("mine", "d" * 64, "/adapters/mine")}
CLASSIFIER = Pooling(labels=("good",))
COSINES, JUDGE = Pooling("last", True), Pooling("last", True, judge=(" no", "Yes"))
Read = Callable[[Mapping[str, Any]], GenerateRequest]


def pairs(read: Any, pooling: Pooling) -> Read:
    return lambda body: read(body, SPEC, pooling, TOKENIZER, ADAPTERS)


SCORE, RERANK = {"text_1": "a", "text_2": ["b", "c"]}, {"query": "a", "documents": ["b", "c"]}
ENDPOINTS: dict[str, tuple[Read, dict[str, Any]]] = {
    "completion": (partial(read_completion, spec=SPEC, adapters=ADAPTERS), {"prompt": "a"}),
    "chat": (partial(read_chat, spec=SPEC, adapters=ADAPTERS), {"messages": [{"role": "user", "content": "a"}]}),
    "generate": (partial(read_generate, spec=SPEC, adapters=ADAPTERS), {"token_ids": [5, 6]}),
    "embeddings": (lambda body: read_embeddings(body, SPEC, COSINES, ADAPTERS), {"input": "a"}),
    "score": (pairs(read_score, COSINES), SCORE),
    "rerank": (pairs(read_rerank, COSINES), RERANK),
    "judged score": (pairs(read_score, JUDGE), SCORE),
    "judged rerank": (pairs(read_rerank, JUDGE), RERANK),
    "classes": (lambda body: read_classify(body, SPEC, CLASSIFIER, ADAPTERS), {"input": "a"}),
    "classified score": (pairs(read_score, CLASSIFIER), SCORE),
}
SHARED = {
    "cache_salt": ("salt", "s1"),
    "user": ("session", "u1"),
    "priority": ("priority", -7),
    "timeout": ("timeout_s", 2.5),
    "model": ("model_name", "mine"),
}
"""Fields that all endpoints have: what they are in the request, and a value."""


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_fields_that_all_endpoints_have_are_in_the_request(endpoint: str) -> None:
    read, least = ENDPOINTS[endpoint]
    usual = read(least)
    for field, (name, value) in SHARED.items():
        found = read({**least, field: value})
        assert getattr(found, name) == value != getattr(usual, name), field
    for field, (name, _) in SHARED.items():  # And none of them is another one.
        rest = {other: given for other, (_, given) in SHARED.items() if other != field}
        assert getattr(read({**least, **rest}), name) == getattr(usual, name), field
    assert read({**least, "nonsense": 1}).ignored == ("nonsense",)


@pytest.mark.parametrize("endpoint", ["embeddings", "score", "rerank", "completion", "chat"])
def test_prompts_are_cut_as_asked_for_where_they_may_be(endpoint: str) -> None:
    read, least = ENDPOINTS[endpoint]
    assert read(least).truncate_prompt_tokens is None
    for kept in (1, 9, -1):
        assert read({**least, "truncate_prompt_tokens": kept}).truncate_prompt_tokens == kept


@pytest.mark.parametrize("special", [False, True])
def test_a_judgements_prompt_has_no_special_tokens_added_and_others_as_asked(special: bool) -> None:
    asked = {"add_special_tokens": special}
    for endpoint in ("embeddings", "score", "rerank", "completion"):
        read, least = ENDPOINTS[endpoint]
        assert read({**least, **asked}).add_special_tokens == special, endpoint
    for endpoint in ("judged score", "judged rerank"):
        read, least = ENDPOINTS[endpoint]
        assert read({**least, **asked}).add_special_tokens is False


@pytest.mark.parametrize("normalise", [False, True])
def test_vectors_are_normalised_as_the_checkpoint_says_and_scores_always(normalise: bool) -> None:
    request = read_embeddings({"input": ["a", "b"], "dimensions": 2}, SPEC, Pooling("last", normalise))
    form = request.embedding
    assert form is not None
    assert (form.normalise, form.dimensions) == (normalise, 2)
    writer = EmbeddingWriter(form, "m")
    writer.bind(choices(2))
    for index in (1, 0):
        writer.take(index, [3.0, 4.0, 5.0 + index])
    told = json.loads(joined(writer.whole(None)))
    want = [0.6, 0.8] if normalise else [3.0, 4.0]
    assert [one["embedding"] for one in told["data"]] == [pytest.approx(want)] * 2
    assert [one["index"] for one in told["data"]] == [0, 1]


@pytest.mark.parametrize("sizes", [(192, 768, 192), (192, 96, 48), (192, 768)])
def test_dimensions_are_at_most_what_the_last_dense_module_gives(sizes: tuple[int, ...]) -> None:
    dense = tuple(DenseModule({}, given, made, bias=False, tanh=False) for given, made in pairwise(sizes))
    pooling, body = Pooling("mean", dense=dense), {"input": "a", "dimensions": sizes[-1]}
    assert read_embeddings(body, SPEC, pooling).embedding is not None
    with pytest.raises(RequestError, match=f"is above the {sizes[-1]} that the model has"):
        read_embeddings({**body, "dimensions": sizes[-1] + 1}, SPEC, pooling)


def test_a_dimension_may_be_the_models_own_and_entries_as_many_as_the_bound() -> None:
    hidden = json.loads((DEMO / "config.json").read_text())["hidden_size"]
    assert read_embeddings({"input": "a", "dimensions": hidden}, SPEC, COSINES).embedding is not None
    request = read_score({"text_1": "a", "text_2": ["b"] * 2048}, SPEC, COSINES, TOKENIZER)
    assert len(request.prompts) == 2
    mixed = {"query": "a", "documents": ["b", {"text": "c"}]}
    assert read_rerank(mixed, SPEC, COSINES, TOKENIZER).prompts == ("a", "b", "c")
    spaced = read_score({"text_1": "b", "text_2": ["b ", "b", "B"]}, SPEC, COSINES, TOKENIZER)
    assert spaced.prompts == ("b", "b ", "B"), "texts that aren't equal are others"


def choices(count: int) -> list[Any]:
    """Outputs of prompts of 10, 20... tokens, of which 1, 2... were cached."""
    return [
        SimpleNamespace(index=n, request=SimpleNamespace(prompt=[7] * 10 * (n + 1)), cached_tokens=n + 1)
        for n in range(count)
    ]


def ranked(scores: Mapping[int, float], top_n: int | None = None, kind: str = "rerank") -> dict[str, Any]:
    """An answer to judgements with these differences of their two logits, which come in another order."""
    form = PairFormat(kind, places=tuple((n, n) for n in range(len(scores))), yes_at=1, top_n=top_n)  # type: ignore[arg-type]
    writer = PairWriter(EmbeddingFormat(pairs=form), form, "id", 5, "m")
    writer.bind(choices(len(scores)))
    for index in sorted(scores, reverse=True):
        writer.take(index, [1.0, 1.0 + scores[index]])
    return dict(json.loads(b"".join(writer.whole({"t": 1}))))


def test_of_equal_scores_the_first_document_comes_first_and_no_difference_is_too_large() -> None:
    told = ranked({0: -2000.0, 1: 3.0, 2: 2000.0, 3: 3.0, 4: 0.0})
    assert [one["index"] for one in told["results"]] == [2, 1, 3, 4, 0]
    sure = 1 / (1 + math.exp(-3))
    assert [one["relevance_score"] for one in told["results"]] == pytest.approx([1.0, sure, sure, 0.5, 0.0])
    assert [one["index"] for one in ranked({0: 1.0, 1: 1.0, 2: 2.0}, top_n=2)["results"]] == [2, 0]
    assert told["usage"] == {
        "prompt_tokens": 150, "total_tokens": 150, "prompt_tokens_details": {"cached_tokens": 15},
    }  # fmt: skip
    assert told["twinpool"] == {"t": 1}
    assert [one["index"] for one in ranked({0: 1.0, 1: 2.0}, kind="score")["data"]] == [0, 1]


def test_a_cosine_is_of_its_own_pair_whichever_vector_comes_last() -> None:
    vectors = [[2.0, 0.0], [0.0, 3.0], [1.0, 1.0]]
    want = {(0, 1): 0.0, (0, 2): math.sqrt(0.5), (1, 2): math.sqrt(0.5), (2, 2): 1.0}
    for last in range(3):
        form = PairFormat("score", places=tuple(want))
        writer = PairWriter(EmbeddingFormat(pairs=form), form, "id", 5, "m")
        writer.bind(choices(3))
        for index in sorted(range(3), key=lambda n: n == last):
            writer.take(index, vectors[index])
        told = json.loads(joined(writer.whole(None)))
        assert [one["score"] for one in told["data"]] == pytest.approx(list(want.values()))


def test_a_reranker_whose_two_words_are_one_token_is_refused() -> None:
    with pytest.raises(RequestError, match="'Yes' and 'Yes' are one token") as refused:
        read_rerank(RERANK, SPEC, Pooling("last", True, judge=("Yes", "Yes")), TOKENIZER)
    assert refused.value.param == "model"


# ---------------------------------------------------------------- token ids


def outputs(prompts: int, n: int) -> list[Any]:
    """Outputs of `n` choices of each prompt, the first of which has the scores of its prompt: the token itself isn't
    among the likeliest, and one is impossible."""
    scores = [TokenLogprob(8, -3.5, ((4, -0.5), (5, -1.0))), TokenLogprob(9, -math.inf, ((6, -0.25), (9, -math.inf)))]
    return [
        SimpleNamespace(
            index=at,
            request=SimpleNamespace(prompt=[7] * 10 * (at // n + 1)),
            cached_tokens=at // n + 1,
            tokens=[1, 2, 3][: at + 1],
            scores=scores if at % n == 0 else [],
            logprobs=[],
            finish="length",
            stop=None,
        )
        for at in range(prompts * n)
    ]


def test_a_prompts_token_that_is_not_among_the_likeliest_has_no_rank_and_an_impossible_one_a_number() -> None:
    request = read_generate({"token_ids": [7] * 10, "sampling_params": {"n": 2, "prompt_logprobs": 1}}, SPEC)
    writer = TokenWriter(request, "id", 5, "m")
    writer.bind(outputs(1, 2))
    told = json.loads(joined(writer.whole(None)))
    shown = [
        {name: (one["logprob"], one["rank"]) for name, one in each.items()} for each in told["prompt_logprobs"][1:]
    ]
    assert shown == [{"8": (-3.5, None), "4": (-0.5, 1)}, {"9": (-9999.0, 2), "6": (-0.25, 1)}]
    assert told["usage"] == {
        "prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13, "prompt_tokens_details": {"cached_tokens": 1},
    }  # fmt: skip


def test_a_stream_of_tokens_counts_while_it_runs_and_ends_with_what_was_asked_for() -> None:
    asked = {"token_ids": [7] * 10, "stream": True, "sampling_params": {"n": 2}}
    for options, each, last in (
        ({}, False, False),
        ({"include_usage": True}, False, True),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
    ):
        writer = TokenWriter(read_generate({**asked, "stream_options": options}, SPEC), "id", 5, "m")
        writer.bind(outputs(1, 2))
        piece = SimpleNamespace(index=1, tokens=[], logprobs=[], finish=None, stop=None)
        assert writer.chunk(piece) == b"", "neither tokens nor an end"  # type: ignore[arg-type]
        piece.finish, piece.stop = "stop", 9
        event = json.loads(writer.chunk(piece).removeprefix(b"data: "))  # type: ignore[arg-type]
        (choice,) = event["choices"]
        assert (choice["index"], choice["token_ids"], choice["stop_reason"]) == (1, [], 9)
        assert ("usage" in event) == each
        *events, done = writer.closing(None).split(b"\n\n")[:-1]
        assert done == b"data: [DONE]"
        assert ["usage" in json.loads(one.removeprefix(b"data: ")) for one in events] == [True] * last
        timed = json.loads(writer.closing({"t": 1}).split(b"\n\n")[0].removeprefix(b"data: "))
        assert (timed["twinpool"], timed["choices"], "usage" in timed) == ({"t": 1}, [], last)


@pytest.mark.parametrize("stop", [None, "", []])
def test_a_stop_that_says_nothing_is_none(stop: object) -> None:
    request = read_generate({"token_ids": [5], "sampling_params": {"stop": stop}, "temperature": None}, SPEC)
    assert request.stops == ()
    assert with_fields(request.sampling, seed=0) == with_fields(
        read_generate({"token_ids": [5]}, SPEC).sampling, seed=0
    )
