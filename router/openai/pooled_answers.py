"""Answers that prefill workers give alone, of prompts that are not continued: embeddings, classes, scores of pairs of
texts, and documents ranked for a query (`/v1/embeddings`, `/classify`, `/v1/score`, `/v1/rerank`), from the body to
what is written.

A vector is cut to the dimensions that are asked for, brought to length 1 and written as soon as it comes, so that an
answer with many of them never holds up the streams of others at its end. It is a function of the worker's float32s
alone: sums are exact.

**A pair's score** is the cosine of its two embeddings; each text is computed once. Of a checkpoint that says
`classifier_from_token` in its `config.json` (as vLLM has rerankers made of decoders, Qwen3-Reranker above all) it is
what the model judges: query and document stand in one prompt, and the score is the second token's share of the
probability of both. The worker sends the two logits in place of an embedding. Of one with a head for one class
(``ForSequenceClassification``) it is that class's probability for the pair as its tokenizer joins it.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from twinpool.contracts.checkpoint.model_spec import HIDDEN, ModelSpec, Pooling
from twinpool.contracts.compact_json import compact_json
from twinpool.contracts.errors import RequestError
from twinpool.contracts.sampling_params import CLASSES, JUDGED, SamplingParams
from twinpool.router.openai.api_errors import ApiError
from twinpool.router.openai.choice_output import ChoiceOutput, OutputDelta
from twinpool.router.openai.parse_request import (
    NO_ADAPTERS,
    Activation,
    Adapters,
    EmbeddingFormat,
    GenerateRequest,
    PairFormat,
    Prompt,
    check_model,
    read_prompts,
)
from twinpool.router.openai.request_fields import (
    EMBEDDINGS,
    MAX_INPUTS,
    TEXT,
    RequestField,
    array_of,
    describe,
    object_of,
    read_fields,
    shaped,
)
from twinpool.router.text.tokenizer import GuardedText, ModelTokenizer

_SHARED = ["add_special_tokens", "cache_salt", "user", "truncate_prompt_tokens", "priority", "timeout", "model"]
_TEXTS = shaped({"oneOf": [TEXT, array_of(TEXT, minItems=1, maxItems=MAX_INPUTS)]})
_DOCUMENT = {"oneOf": [TEXT, object_of("text", text=TEXT)]}
_ACTIVATED = RequestField("boolean", "Of a model with a head for classes: false answers its logits.")
_INSTRUCTION = RequestField("string", "What a reranker is told to judge by; of others it is no part.")
SCORE: dict[str, RequestField] = {
    **{name: EMBEDDINGS[name] for name in _SHARED},
    **dict.fromkeys(("text_1", "text_2", "queries", "documents"), _TEXTS),
    "instruction": _INSTRUCTION,
    "use_activation": _ACTIVATED,
}
"""The fields of `/v1/score`. `queries` and `documents` are newer names of `text_1` and `text_2`."""
RERANK: dict[str, RequestField] = {
    **{name: EMBEDDINGS[name] for name in _SHARED},
    "query": RequestField("string", "What documents are ranked for."),
    "documents": shaped(array_of(_DOCUMENT, minItems=1, maxItems=MAX_INPUTS)),
    "top_n": RequestField("integer", "How many of the best are answered; all if it isn't given.", 1, 2**31 - 1),
    "return_documents": RequestField("boolean", "Add the document's text to each result.", default=False),
    "instruction": _INSTRUCTION,
    "use_activation": _ACTIVATED,
}
"""The fields of `/v1/rerank`."""
CLASSIFY = {name: EMBEDDINGS[name] for name in (*_SHARED, "input")} | {"use_activation": _ACTIVATED}
"""The fields of `/classify`."""

_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {}\n<Query>: {}\n<Document>: {}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The prompt that Qwen3-Reranker was trained with."""
_INSTRUCT = "Given a web search query, retrieve relevant passages that answer the query"
"""What its makers have it judge by where nothing is said."""


def read_embeddings(
    body: Mapping[str, Any], spec: ModelSpec, pooling: Pooling, adapters: Adapters = NO_ADAPTERS
) -> GenerateRequest:
    """Read a body of `/v1/embeddings`. `pooling`: the checkpoint's. `adapters`: those that are served.

    Raises `RequestError` naming the field that is wrong, `UnknownModel` for a model that isn't served.
    """
    adapter = check_model(body, spec, adapters)
    if pooling.refusal:
        raise RequestError(f"this model makes no embeddings here: {pooling.refusal}", param="model")
    values, ignored = read_fields(body, EMBEDDINGS)
    prompts = read_prompts(body.get("input"), spec, "input")
    if len(prompts) > MAX_INPUTS:
        raise RequestError(f"input has {len(prompts)} entries; a request takes at most {MAX_INPUTS}", param="input")
    if "" in prompts or () in prompts:
        raise RequestError("input has an entry that is empty", param="input")
    if values.get("truncate_prompt_tokens") == 0:
        raise RequestError("truncate_prompt_tokens is 1 or more, or -1", param="truncate_prompt_tokens")
    return GenerateRequest(
        chat=False,
        embedding=_read_embedding_format(body, values, spec, pooling),
        prompts=prompts,
        truncate_prompt_tokens=values.get("truncate_prompt_tokens"),
        n=1,
        add_special_tokens=values["add_special_tokens"],
        max_tokens=0,
        sampling=SamplingParams(max_tokens=0, temperature=0.0, pooling=pooling.asked, adapter=adapter),
        seeded=True,
        salt=values["cache_salt"],
        session=values["user"],
        priority=values["priority"],
        timeout_s=values.get("timeout"),
        ignored=ignored,
    )


def _read_embedding_format(
    body: Mapping[str, Any], values: Mapping[str, Any], spec: ModelSpec, pooling: Pooling
) -> EmbeddingFormat:
    encoding, dimensions = body.get("encoding_format"), values.get("dimensions")
    size = pooling.dense[-1].outputs if pooling.dense else spec.config.peek(HIDDEN)
    if encoding not in (None, "float", "base64"):
        raise RequestError(
            f"encoding_format must be float or base64; got {describe(encoding)}", param="encoding_format"
        )
    if dimensions is not None and isinstance(size, int) and dimensions > size:
        raise RequestError(f"dimensions {dimensions} is above the {size} that the model has", param="dimensions")
    normalise = values.get("normalize", pooling.normalise)
    return EmbeddingFormat("input", dimensions, encoding == "base64", normalise)


def embedding_of(vector: Sequence[float], form: EmbeddingFormat) -> NDArray[np.float32]:
    """The embedding that a client gets, [dimensions] float32, of a worker's vector ([hidden]): cut first, then
    normalised."""
    kept_d = np.array(vector[: form.dimensions], np.float64)
    length = math.sqrt(math.fsum((kept_d * kept_d).tolist())) if form.normalise else 1.0
    return (kept_d / length if length else kept_d).astype(np.float32)


class EmbeddingWriter:
    """The writer of one answer with embeddings, which is never streamed. Implements
    `router.openai.response_stream.AnswerWriter`."""

    def __init__(self, form: EmbeddingFormat, model: str) -> None:
        self._form, self._model = form, model
        self._choices: list[ChoiceOutput] = []
        self._written: dict[int, bytes] = {}
        """By choice, its embedding as JSON."""

    def bind(self, choices: list[ChoiceOutput]) -> None:
        """Set the choices; called once, before anything is written."""
        self._choices = choices

    def take(self, index: int, vector: Sequence[float]) -> None:
        """Take the embedding of a choice's prompt, as its worker sent it."""
        embedding_d = embedding_of(vector, self._form)
        if self._form.base64:
            self._written[index] = b'"' + base64.b64encode(embedding_d.astype("<f4", copy=False).tobytes()) + b'"'
        else:
            self._written[index] = msgspec.json.encode(embedding_d.tolist())

    def chunk(self, piece: OutputDelta) -> bytes:
        """Return nothing: no event tells of an embedding."""
        return b""

    def closing(self, twinpool: object | None) -> bytes:
        """Return nothing, as `chunk` does."""
        return b""

    @staticmethod
    def failed(failure: ApiError) -> bytes:
        """Return the failure, as the rest of a body that was begun."""
        return failure.to_json()

    def whole(self, twinpool: object | None) -> list[bytes]:
        """Return the body, in parts."""
        parts = [b'{"object":"list","data":[']
        for choice in self._choices:
            head = f'{"," if choice.index else ""}{{"object":"embedding","index":{choice.index},"embedding":'
            parts += (head.encode(), self._written[choice.index], b"}")
        tree: dict[str, Any] = {"model": self._model, "usage": self._usage()}
        if twinpool is not None:
            tree["twinpool"] = twinpool
        return [*parts, b"]," + compact_json(tree)[1:].encode()]

    def _usage(self) -> dict[str, Any]:
        prompt = sum(len(choice.request.prompt) for choice in self._choices)
        cached = sum(choice.cached_tokens for choice in self._choices)
        return {"prompt_tokens": prompt, "total_tokens": prompt, "prompt_tokens_details": {"cached_tokens": cached}}


# ---------------------------------------------------------------- classes


def read_classify(
    body: Mapping[str, Any], spec: ModelSpec, pooling: Pooling, adapters: Adapters = NO_ADAPTERS
) -> GenerateRequest:
    """Read a body of `/classify`. Raises as `read_embeddings` does, and for a model without a head for classes."""
    values, ignored = read_fields(body, CLASSIFY)
    inner = {name: value for name, value in body.items() if name in EMBEDDINGS}
    request = read_embeddings(inner, spec, replace(pooling, refusal=""), adapters)
    if not pooling.labels:
        message = "this model has no head for classes (ForSequenceClassification): embeddings are at /v1/embeddings"
        raise RequestError(message, param="model")
    form = EmbeddingFormat(labels=pooling.labels, activation=_activation(pooling, values.get("use_activation")))
    sampling = structs.replace(request.sampling, pooling=CLASSES)
    return replace(request, embedding=form, sampling=sampling, ignored=ignored)


def _activation(pooling: Pooling, wanted: bool | None) -> Activation:
    """What is made of the logits of classes: as vLLM has it, by what transformers trains the model with."""
    if wanted is False or (wanted is None and pooling.problem == "regression"):
        return "none"
    several = len(pooling.labels) > 1 and pooling.problem != "multi_label_classification"
    return "softmax" if several else "sigmoid"


class ClassWriter(EmbeddingWriter):
    """The writer of the classes of texts."""

    def __init__(self, form: EmbeddingFormat, answer_id: str, created: int, model: str) -> None:
        super().__init__(form, model)
        self._id, self._created = answer_id, created
        self._classes: dict[int, dict[str, Any]] = {}

    def take(self, index: int, vector: Sequence[float]) -> None:
        """Take the logits of a prompt's classes. Raises `ValueError` where there are more or fewer."""
        best, label = max(zip(vector, self._form.labels, strict=True), key=lambda pair: pair[0])
        probs = list(vector)
        if self._form.activation == "sigmoid":
            probs = [_sigmoid(logit) for logit in vector]
        elif self._form.activation == "softmax":
            powers = [math.exp(logit - best) for logit in vector]
            total = math.fsum(powers)
            probs = [power / total for power in powers]
        self._classes[index] = {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}

    def whole(self, twinpool: object | None) -> list[bytes]:
        """Return the body."""
        told: dict[str, Any] = {"id": f"classify-{self._id}", "object": "list", "created": self._created}
        told |= {"model": self._model, "data": [self._classes[choice.index] for choice in self._choices]}
        told["usage"] = self._usage()
        if twinpool is not None:
            told["twinpool"] = twinpool
        return [compact_json(told).encode()]


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit > 0 else math.exp(logit) / (1 + math.exp(logit))


# ---------------------------------------------------------------- pairs


def read_score(
    body: Mapping[str, Any],
    spec: ModelSpec,
    pooling: Pooling,
    tokenizer: ModelTokenizer,
    adapters: Adapters = NO_ADAPTERS,
) -> GenerateRequest:
    """Read a body of `/v1/score`: one text for each of many, or pairs. `pooling`: the checkpoint's. Raises
    `RequestError`, `UnknownModel` as `read_embeddings` does."""
    values, ignored = read_fields(body, SCORE)
    first, second = _given(body, "queries", "text_1"), _given(body, "documents", "text_2")
    lefts, rights = _texts(body.get(first), first), _texts(body.get(second), second)
    if len(lefts) not in (1, len(rights)):
        raise RequestError(
            f"{first} has {len(lefts)} texts and {second} {len(rights)}: give one, or one for each", param=first
        )
    pairs = [(lefts[0] if len(lefts) == 1 else lefts[at], right) for at, right in enumerate(rights)]
    request = _without_texts(body, values, spec, pooling, adapters, ignored)
    return _with_pairs(request, second, PairFormat("score"), pairs, pooling, tokenizer, values)


def read_rerank(
    body: Mapping[str, Any],
    spec: ModelSpec,
    pooling: Pooling,
    tokenizer: ModelTokenizer,
    adapters: Adapters = NO_ADAPTERS,
) -> GenerateRequest:
    """Read a body of `/v1/rerank`. Raises `RequestError`, `UnknownModel` as `read_embeddings` does."""
    values, ignored = read_fields(body, RERANK)
    query, documents = values.get("query"), body.get("documents")
    if not query:
        raise RequestError("query is missing or empty", param="query")
    if isinstance(documents, list):
        documents = [one.get("text") if isinstance(one, dict) else one for one in documents]
    texts = _texts(documents, "documents")
    request = _without_texts(body, values, spec, pooling, adapters, ignored)
    shown = tuple(texts) if values["return_documents"] else ()
    asked, pairs = PairFormat("rerank", top_n=values.get("top_n"), documents=shown), [(query, text) for text in texts]
    return _with_pairs(request, "documents", asked, pairs, pooling, tokenizer, values)


def _given(body: Mapping[str, Any], newer: str, older: str) -> str:
    """Which of a field's two names a body has. Raises `RequestError` for both."""
    if body.get(newer) is None:
        return older
    if body.get(older) is not None:
        raise RequestError(f"{newer} and {older} are names of one field: give one of them", param=newer)
    return newer


def _texts(given: object, name: str) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if texts is None or texts == []:
        raise RequestError(f"{name} is missing or empty", param=name)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{name} must be a text or an array of texts; got {describe(given)}", param=name)
    if len(texts) > MAX_INPUTS:
        raise RequestError(f"{name} has {len(texts)} entries; a request takes at most {MAX_INPUTS}", param=name)
    if "" in texts:
        raise RequestError(f"{name} has an entry that is empty", param=name)
    return texts


def _without_texts(
    body: Mapping[str, Any],
    values: Mapping[str, Any],
    spec: ModelSpec,
    pooling: Pooling,
    adapters: Adapters,
    ignored: tuple[str, ...],
) -> GenerateRequest:
    """Return a request for vectors, of which all but the texts is read."""
    inner = {name: values[name] for name in _SHARED if name in values} | {"model": body.get("model"), "input": "-"}
    judged = pooling.judge is not None
    request = read_embeddings(inner, spec, replace(pooling, refusal="") if judged else pooling, adapters)
    return replace(request, ignored=ignored)


def _with_pairs(
    request: GenerateRequest,
    field: str,
    asked: PairFormat,
    pairs: Sequence[tuple[str, str]],
    pooling: Pooling,
    tokenizer: ModelTokenizer,
    values: Mapping[str, Any],
) -> GenerateRequest:
    """Return the request with prompts by which each of `pairs` gets its score. `field`: of the body, with the second
    texts."""
    instruction, activated = values.get("instruction"), values.get("use_activation")
    if pooling.labels:
        return _with_classified(request, field, asked, pairs, pooling, tokenizer, values)
    if activated is not None:
        message = "use_activation is for models with a head for classes, and this one has none"
        raise RequestError(message, param="use_activation")
    if pooling.judge is None:
        if instruction is not None:
            raise RequestError("instruction is for rerankers: write it into the text here", param="instruction")
        at: dict[str, int] = {}
        places = tuple((at.setdefault(left, len(at)), at.setdefault(right, len(at))) for left, right in pairs)
        form = EmbeddingFormat(field, pairs=replace(asked, places=places))
        return replace(request, prompts=tuple(at), embedding=form)
    if request.truncate_prompt_tokens is not None:
        message = "a reranker's prompt isn't cut: shorten the texts"
        raise RequestError(message, param="truncate_prompt_tokens")
    no, yes = (_one_token(word, tokenizer) for word in pooling.judge)
    if no == yes:
        message = f"config.json's classifier_from_token: {' and '.join(map(repr, pooling.judge))} are one token"
        raise RequestError(f"{message} of this model: it can't judge by them", param="model")
    ids = tuple(sorted((no, yes)))
    judged = replace(asked, places=tuple((n, n) for n in range(len(pairs))), yes_at=ids.index(yes))
    return replace(
        request,
        prompts=tuple(_judged(instruction or _INSTRUCT, *pair, tokenizer) for pair in pairs),
        add_special_tokens=False,
        embedding=EmbeddingFormat(field, pairs=judged),
        sampling=structs.replace(request.sampling, pooling=JUDGED, allowed_token_ids=ids),
    )


def _with_classified(
    request: GenerateRequest,
    field: str,
    asked: PairFormat,
    pairs: Sequence[tuple[str, str]],
    pooling: Pooling,
    tokenizer: ModelTokenizer,
    values: Mapping[str, Any],
) -> GenerateRequest:
    """Return the request with a prompt a pair, of which a head for one class makes the score."""
    if len(pooling.labels) != 1:
        message = f"this model tells {len(pooling.labels)} classes, and a score is of one: ask /classify"
        raise RequestError(message, param="model")
    for name in ("instruction", "truncate_prompt_tokens"):
        if values.get(name) is not None:
            raise RequestError(f"{name} isn't for models that judge a pair as it is given", param=name)
    raw = not values.get("use_activation", not pooling.raw_scores)
    scored = replace(asked, places=tuple((n, n) for n in range(len(pairs))))
    special = values["add_special_tokens"]
    return replace(
        request,
        prompts=tuple(tokenizer.encode_pair(*pair, add_special=special, param=field) for pair in pairs),
        embedding=EmbeddingFormat(field, pairs=scored, activation="none" if raw else "sigmoid"),
        sampling=structs.replace(request.sampling, pooling=CLASSES),
    )


def _one_token(word: str, tokenizer: ModelTokenizer) -> int:
    tokens = tokenizer.encode(word, add_special=False, param="model")
    if len(tokens) != 1:
        message = f"config.json's classifier_from_token: {word!r} is {len(tokens)} tokens of this model, not one"
        raise RequestError(message, param="model")
    return tokens[0]


def _judged(instruction: str, query: str, document: str, tokenizer: ModelTokenizer) -> Prompt:
    """The prompt of a pair. Names of special tokens in what a client wrote are text."""
    texts, guard = tokenizer.guarded([instruction, query, document])
    prompt = _JUDGE.format(*texts)
    return GuardedText(prompt, guard) if guard else prompt


class PairWriter(EmbeddingWriter):
    """The writer of scores of pairs, or of ranked documents. A score is computed once both its vectors are here."""

    def __init__(self, form: EmbeddingFormat, pairs: PairFormat, answer_id: str, created: int, model: str) -> None:
        super().__init__(form, model)
        self._pairs, self._id, self._created = pairs, answer_id, created
        self._vectors: dict[int, NDArray[np.float64]] = {}
        self._scores: dict[int, float] = {}
        self._of: dict[int, list[int]] = {}
        for number, place in enumerate(pairs.places):
            for prompt in dict.fromkeys(place):
                self._of.setdefault(prompt, []).append(number)

    def take(self, index: int, vector: Sequence[float]) -> None:
        """Take what a prompt's worker sent: its embedding, the logits of the two tokens of a judgement, or that of its
        class. Raises `ValueError` where it is none of these."""
        if self._pairs.yes_at is not None:
            no, yes = vector if self._pairs.yes_at else reversed(vector)
            self._scores[index] = _sigmoid(yes - no)
            return
        if self._form.activation:
            (logit,) = vector
            self._scores[index] = _sigmoid(logit) if self._form.activation == "sigmoid" else logit
            return
        self._vectors[index] = embedding_of(vector, EmbeddingFormat()).astype(np.float64)
        for number in self._of[index]:
            left, right = (self._vectors.get(prompt) for prompt in self._pairs.places[number])
            if left is not None and right is not None:
                self._scores[number] = float((left * right).sum())

    def whole(self, twinpool: object | None) -> list[bytes]:
        """Return the body."""
        told: dict[str, Any] = {"id": f"{self._pairs.kind}-{self._id}", "model": self._model}
        scores = [self._scores[number] for number in range(len(self._pairs.places))]
        if self._pairs.kind == "score":
            told |= {"object": "list", "created": self._created}
            told["data"] = [{"index": at, "object": "score", "score": score} for at, score in enumerate(scores)]
        else:
            best = sorted(range(len(scores)), key=lambda at: (-scores[at], at))[: self._pairs.top_n]
            shown = self._pairs.documents
            told["results"] = [
                {"index": at, "relevance_score": scores[at], **({"document": {"text": shown[at]}} if shown else {})}
                for at in best
            ]
        told["usage"] = self._usage()
        if twinpool is not None:
            told["twinpool"] = twinpool
        return [compact_json(told).encode()]


def pooled_writer(form: EmbeddingFormat, answer_id: str, created: int, model: str) -> EmbeddingWriter:
    """What writes such an answer."""
    if form.pairs is not None:
        return PairWriter(form, form.pairs, answer_id, created, model)
    return ClassWriter(form, answer_id, created, model) if form.labels else EmbeddingWriter(form, model)
