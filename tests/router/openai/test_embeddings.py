"""The endpoint `/v1/embeddings`: what a client gets of the vectors of workers, and what is refused."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from openai import OpenAI
from safetensors.numpy import save_file

from tests.router.fake_worker import embedding
from tests.router.http_server import Server
from tests.router.stage import Stage
from tests.support.checkpoints import make_checkpoint
from twinpool.contracts.checkpoint.model_spec import Pooling, read_model_spec, read_pooling
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import Role
from twinpool.contracts.messages.worker_events import Done, Embedding, LegReport
from twinpool.router.openai.parse_request import EmbeddingFormat
from twinpool.router.openai.pooled_answers import embedding_of

PATH = "/v1/embeddings"
TEXT = "how do pages get from one worker to the other"


def unit(tokens: list[int], dimensions: int = 8) -> NDArray[np.float64]:
    """What a client must get of these tokens."""
    values = np.array(embedding(tokens)[:dimensions])
    return np.asarray(values / np.linalg.norm(values), np.float64)


def tokens_of(server: Server, text: str) -> list[int]:
    return list(server.service.model_tokenizer.encode(text, add_special=True))


def test_the_openai_client_gets_a_vector_for_each_input_as_numbers_and_as_base64(server: Server) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        texts = [TEXT, "b", TEXT + "!"]
        packed = client.embeddings.create(model="demo", input=texts, user="me")
        plain = client.embeddings.create(model="demo", input=texts, encoding_format="float")
    for index, (one, other, text) in enumerate(zip(packed.data, plain.data, texts, strict=True)):
        np.testing.assert_allclose(one.embedding, unit(tokens_of(server, text)), rtol=1e-6)
        assert one.embedding == other.embedding, "of the same bits"
        assert one.index == other.index == index
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == sum(len(tokens_of(server, t)) for t in texts)
    assert packed.model == "demo"


@pytest.mark.parametrize(("given", "each"), [([5, 6, 7], [[5, 6, 7]]), ([[5, 6], [7]], [[5, 6], [7]])])
def test_token_ids_are_taken_one_list_or_many(server: Server, given: Any, each: list[list[int]]) -> None:
    data = server.post(PATH, {"input": given}).json()["data"]
    for found, tokens in zip(data, each, strict=True):
        np.testing.assert_allclose(found["embedding"], unit(tokens), rtol=1e-6)


def test_fewer_dimensions_are_cut_and_then_normalised_again(server: Server) -> None:
    answer = server.post(PATH, {"input": [5, 6, 7], "dimensions": 3, "encoding_format": "base64"}).json()
    vector = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(vector, unit([5, 6, 7], 3), rtol=1e-6)
    assert abs(float(np.linalg.norm(vector)) - 1) < 1e-6
    assert server.post(PATH, {"input": [5, 6, 7], "dimensions": 192}).status_code == 200, "as many as the model has"


def test_a_request_says_whether_its_vectors_keep_their_length(server: Server) -> None:
    answer = server.post(PATH, {"input": [5, 6, 7], "normalize": False}).json()
    np.testing.assert_allclose(answer["data"][0]["embedding"], embedding([5, 6, 7]), rtol=1e-6)


def test_no_decode_worker_is_asked_and_the_timeline_is_there(server: Server) -> None:
    answer = server.post(PATH, {"input": [5, 6]}, **{"X-Twinpool-Timeline": "1", "Idempotency-Key": "k"}).json()
    assert answer["twinpool"]["decode_worker"] is None
    assert not [s for w in server.cluster.workers.values() if w.role is Role.DECODE for s in w.submits if not s.peer]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "input is missing or empty"),
        ({"input": []}, "input", "missing or empty"),
        ({"input": ""}, "input", "empty"),
        ({"input": ["a", ""]}, "input", "an entry that is empty"),
        ({"input": [[]]}, "input", "an entry that is empty"),
        ({"input": {"text": "a"}}, "input", "must be a string, an array of token ids, or an array of either"),
        ({"input": [1, "a"]}, "input", "token ids must be integers"),
        ({"input": [-1]}, "input", "out of range"),
        ({"input": [1] * 2049}, "input", "2049 tokens; the context of 2048"),
        ({"input": [[1]] * 2049}, "input", "at most 2048"),
        ({"input": [[1]] * 1025}, "input", "above the server's queue of"),
        ({"input": "\ud800"}, "input", "lone surrogates"),
        ({"input": "a", "dimensions": 0}, "dimensions", "from 1"),
        ({"input": "a", "dimensions": 10**6}, "dimensions", "is above the 192 that the model has"),
        ({"input": "a", "dimensions": "8"}, "dimensions", "must be an integer"),
        ({"input": "a", "normalize": "no"}, "normalize", "must be true or false"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "must be float or base64"),
        ({"input": "a", "model": "other"}, "model", "does not exist"),
        ({"input": "a", "prompt": "b"}, "prompt", "a field of other endpoints"),
        ({"input": "a", "stream": True}, "stream", "a field of other endpoints"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "1 or more, or -1"),
    ],
)
def test_what_is_wrong_is_refused_by_its_field(server: Server, body: dict[str, Any], param: str, says: str) -> None:
    raw = json.dumps(body).encode()
    answer = server.client.post(PATH, content=raw, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (404 if param == "model" else 400, param)
    assert says in error["message"]


def test_an_unknown_field_is_left_out_and_named(server: Server) -> None:
    answer = server.post(PATH, {"input": "a", "dimension": 8})
    assert answer.status_code == 200
    assert answer.headers["x-twinpool-ignored"] == "dimension;meant=dimensions"


def test_a_vector_of_nothing_stays_one_and_what_needs_no_length_keeps_its_own() -> None:
    assert embedding_of([0.0] * 4, EmbeddingFormat()).tolist() == [0.0] * 4
    assert embedding_of([3.0, 4.0], EmbeddingFormat(normalise=False)).tolist() == [3.0, 4.0]


# ---------------------------------------------------------------- how a checkpoint pools


def sentence_transformer(folder: Path, mode: str, *modules: str) -> Path:
    listed = [{"type": f"sentence_transformers.models.{name}", "path": f"{n}_{name}"} for n, name in enumerate(modules)]
    (folder / "1_Pooling").mkdir()
    (folder / "modules.json").write_text(json.dumps(listed))
    modes = dict.fromkeys(("pooling_mode_mean_tokens", "pooling_mode_lasttoken", "pooling_mode_cls_token"), False)
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 8} | modes | {mode: True})
    )
    return folder


def test_a_checkpoints_own_files_say_whether_its_vectors_are_normalised(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == Pooling("last", True), "without any"
    folder = sentence_transformer(tmp_path, "pooling_mode_lasttoken", "Transformer", "Pooling")
    assert read_pooling(folder) == Pooling("last", False)


@pytest.mark.parametrize(
    ("mode", "module", "why"),
    [
        ("pooling_mode_weightedmean_tokens", "Normalize", "it pools by weightedmean_tokens, not by one of last, mean"),
        ("pooling_mode_lasttoken", "LayerNorm", "modules of it aren't supported: LayerNorm"),
        ("pooling_mode_lasttoken", "Pooling", "its modules are Transformer, Pooling, Pooling, and supported is"),
        ("pooling_mode_lasttoken", "Dense", "2_Dense/config.json"),
    ],
)
def test_what_a_checkpoint_needs_and_is_not_here_is_told(tmp_path: Path, mode: str, module: str, why: str) -> None:
    folder = sentence_transformer(tmp_path, mode, "Transformer", "Pooling", module)
    assert why in read_pooling(folder).refusal


@pytest.mark.parametrize(
    ("written", "way", "why"),
    [
        ({"pooling_mode": "mean", "embedding_dimension": 8}, "mean", ""),
        ({"pooling_mode": ["cls"]}, "cls", ""),
        ({"pooling_mode_cls_token": True, "include_prompt": False}, "cls", ""),
        ({}, "mean", ""),
        ({"pooling_mode": ["cls", "mean"]}, "last", "it pools by cls and mean, not by one of last, mean, cls"),
        ({"pooling_mode": "mean", "include_prompt": False}, "last", "leaves prompts out of its mean (include_prompt)"),
    ],
)
def test_a_pooling_is_named_as_sentence_transformers_names_it(
    tmp_path: Path, written: dict[str, Any], way: str, why: str
) -> None:
    folder = sentence_transformer(tmp_path, "", "Transformer", "Pooling", "Normalize")
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(written))
    found = read_pooling(folder)
    assert (found.way, found.asked) == (way, way)
    assert why in found.refusal
    assert bool(why) == bool(found.refusal)


DENSE = {"in_features": 8, "out_features": 4, "activation_function": "torch.nn.modules.linear.Identity"}


@pytest.mark.parametrize(
    ("written", "shapes", "why"),
    [
        (DENSE, {"linear.weight": (4, 8), "linear.bias": (4,)}, ""),
        (DENSE | {"bias": False}, {"linear.weight": (4, 8)}, ""),
        (DENSE, {"linear.weight": (8, 4), "linear.bias": (4,)}, "has tensors"),
        (DENSE, {"linear.weight": (4, 8)}, "has tensors"),
        (DENSE, {}, "weights of Dense are read from safetensors alone"),
        (DENSE | {"activation_function": "torch.nn.modules.activation.GELU"}, {}, "'GELU' is not supported"),
        (DENSE | {"use_residual": True}, {}, "it must make sentence_embedding of sentence_embedding"),
        (DENSE | {"module_input_name": "token_embeddings"}, {}, "it must make sentence_embedding of"),
        (DENSE | {"out_features": 0}, {}, "out_features must be a positive whole number"),
    ],
)
def test_a_dense_module_that_can_not_be_computed_refuses_embeddings_alone(
    tmp_path: Path, written: dict[str, Any], shapes: dict[str, tuple[int, ...]], why: str
) -> None:
    folder = sentence_transformer(tmp_path, "pooling_mode_lasttoken", "Transformer", "Pooling", "Dense")
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "config.json").write_text(json.dumps(written))
    if shapes:
        tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        save_file(tensors, folder / "2_Dense" / "model.safetensors")
    found = read_pooling(folder)
    assert why in found.refusal
    assert [(one.inputs, one.outputs, one.tanh) for one in found.dense] == ([] if why else [(8, 4, False)])
    assert found.asked == ("last" if why else "last+dense")


def test_dense_modules_that_do_not_take_what_the_model_makes_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", layers=1)
    sentence_transformer(folder, "pooling_mode_lasttoken", "Transformer", "Pooling", "Dense")
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "config.json").write_text(json.dumps(DENSE | {"bias": False}))
    save_file({"linear.weight": np.zeros((4, 8), np.float32)}, folder / "2_Dense" / "model.safetensors")
    found = read_model_spec(folder).pooling
    assert (found.dense, found.refusal) == ((), "its Dense modules take [8] numbers and are given [64]")


@pytest.mark.parametrize("text", ["{", "{}", "[1]", "\xff"])
def test_a_list_of_modules_that_is_none_refuses_embeddings_alone(tmp_path: Path, text: str) -> None:
    """Whoever reads bodies reads it: an error would end text as well."""
    (tmp_path / "modules.json").write_text(text, encoding="latin-1")
    assert "modules.json" in read_pooling(tmp_path).refusal


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_pooling_that_can_not_be_read_refuses_embeddings_alone(tmp_path: Path, text: str | None) -> None:
    folder = sentence_transformer(tmp_path, "pooling_mode_lasttoken", "Transformer", "Pooling")
    file = folder / "1_Pooling" / "config.json"
    file.unlink()
    if text is not None:
        file.write_text(text)
    assert str(file) in read_pooling(folder).refusal


# ---------------------------------------------------------------- builds of before, and workers that say less


def asked(stage: Stage) -> list[str]:
    return [key[0] for key, _ in stage.submits]


def test_a_worker_of_a_build_without_embeddings_is_not_asked_for_one() -> None:
    stage = Stage(2, 1, worker_wait_s=1.0)
    old = stage.cluster["prefill-0"]
    old.stream, old.stream_protocol = "127.0.0.1:1", 4
    stage.view()
    rids = [stage.submit(max_tokens=0, pooling="last") for _ in range(3)]
    assert asked(stage) == ["prefill-1"] * 3
    stage.finish()
    assert [stage.embeddings[rid] for rid in rids] == [embedding((5, 6, 7))] * 3
    stage.kill("prefill-1")
    late = stage.submit(max_tokens=0, pooling="last")
    stage.tick(1.1)
    assert stage.ends[late].error is ErrorKind.OVERLOADED
    assert "no prefill worker whose build knows embeddings" in stage.ends[late].message
    assert asked(stage) == ["prefill-1"] * 3


@pytest.mark.parametrize("pooling", ["mean", "cls", "last+dense"])
def test_a_worker_of_a_build_with_the_last_tokens_pooling_alone_is_not_asked_for_another(pooling: str) -> None:
    stage = Stage(2, 1)
    old = stage.cluster["prefill-0"]
    old.stream, old.stream_protocol = "127.0.0.1:1", 8
    stage.view()
    for _ in range(3):
        stage.submit(max_tokens=0, pooling=pooling)
    assert asked(stage) == ["prefill-1"] * 3
    last = [stage.submit(max_tokens=0, pooling="last") for _ in range(3)]
    assert "prefill-0" in asked(stage)[-len(last) :]
    stage.finish()


@pytest.mark.parametrize("vector", [(), None])
def test_an_end_without_an_embedding_is_a_failure_of_that_worker(vector: tuple[()] | None) -> None:
    stage = Stage(2, 1)
    rid = stage.submit(max_tokens=0, pooling="last")
    liar = stage.leg(rid, Role.PREFILL)
    del stage.legs[liar, rid]
    if vector is not None:
        stage.hear(stage.key(liar), Embedding(rid, 0, vector))
    stage.hear(stage.key(liar), LegReport(rid, 0, Role.PREFILL, stage.key(liar)[0]))
    stage.hear(stage.key(liar), Done(rid, 0, "length"))
    assert rid not in stage.ends
    stage.finish()
    assert stage.ends[rid].error is None
    assert stage.embeddings[rid] == embedding((5, 6, 7))
    assert asked(stage)[0] == liar != asked(stage)[-1]
