"""The model spec: a checkpoint's name, vocabulary, lengths and token ids, read while checking that its files are whole.

Reads `config.json`, `generation_config.json` and the headers of the safetensors files, or the header of a GGUF file,
which has all of them; it loads no tensor and needs no torch, so a bad checkpoint is refused in milliseconds. The engine
(engine/models) reads the rest of `config.json`, and knows which tensors an architecture needs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import structs

from twinpool.contracts.checkpoint.gguf.gguf_config import config_of
from twinpool.contracts.checkpoint.gguf.gguf_header import SUFFIX, is_gguf, read_gguf
from twinpool.contracts.checkpoint.gguf.gguf_tokenizer import GgufTokenizer
from twinpool.contracts.checkpoint.json_fields import JsonFields
from twinpool.contracts.checkpoint.picture_spec import PictureSpec, read_picture_spec
from twinpool.contracts.checkpoint.quantization import Quantization, read_quantization
from twinpool.contracts.checkpoint.rope_spec import context_limits, rope_kind, rotated_for
from twinpool.contracts.checkpoint.safetensors_headers import (
    FLOATS,
    SINGLE,
    TensorHeader,
    check_alike,
    digest_files,
    digest_samples,
    read_file_headers,
    read_headers,
    read_json,
    read_tree,
    weights_folder,
)
from twinpool.contracts.checkpoint.tokenizer_files import end_of_tokenizer
from twinpool.contracts.errors import CheckpointError, ConfigError
from twinpool.contracts.sampling_params import DENSE, POOLINGS, WeightsVersion

GENERATION_CONFIG = "generation_config.json"
MTP = "mtp"
"""The `engine.draft_model` that a checkpoint has itself: its layer for multi-token prediction."""
_GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_TEXT_KEYS = ("text_config", "llm_config")
"""Keys below which `config.json` of multimodal models keeps the text model's keys."""
_QUANTISATION_KEYS = ("quantization_config", "compression_config")
_GEMMA = {"max_position_embeddings": 131_072, "num_attention_heads": 8, "num_key_value_heads": 4}
_LEFT_OUT = {
    "gemma3_text": _GEMMA | {"vocab_size": 262_208},
    "gemma4_text": _GEMMA | {"vocab_size": 262_144, "sliding_window": 512},
}
"""Keys that published folders leave out, with the defaults of their text model's type."""
_TRAINED = "original_max_position_embeddings"
_SPELLINGS = ("rope_theta", "rope_scaling", "rope_parameters", "torch_dtype", "dtype")
_NOISE = ("transformers_version", "use_cache", "architectures", "model_type", "bos_token_id", "eos_token_id")


HIDDEN = "hidden_size"
"""The key of `config.json` that says how long an embedding is."""
JUDGE = "classifier_from_token"
"""The key of `config.json` with the two words of a reranker, as vLLM has it."""
CLASSIFIER = "ForSequenceClassification"
"""What names of architectures with a head for classes (``score``) in place of one for tokens end with."""
_MOST_LABELS = 2**16
"""Classes that a vector of logits has room for."""
_WAYS = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls"}
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
"""The modules of sentence-transformers that are supported, in this order."""


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A module `Dense` of sentence-transformers behind the pooling: a product, and perhaps a hyperbolic tangent."""

    headers: Mapping[str, TensorHeader]
    """Of ``linear.weight`` [outputs, inputs] and, with a bias, ``linear.bias`` [outputs]."""
    inputs: int
    outputs: int
    bias: bool
    tanh: bool


@dataclass(frozen=True, slots=True)
class Pooling:
    """What is made of the hidden states of a prompt."""

    way: str = "last"
    """One of `POOLINGS` where it is supported."""
    normalise: bool = True
    """Whether the vector is brought to length 1."""
    refusal: str = ""
    """Why no embeddings are made; empty where they are."""
    judge: tuple[str, str] | None = None
    """The two words, each a token, between which a reranker chooses for a pair of texts, that against it first; None:
    it is no reranker."""
    labels: tuple[str, ...] = ()
    """The classes that a checkpoint of `CLASSIFIER` tells apart by the last token; empty: it generates text."""
    problem: str = ""
    """Its `problem_type`, as transformers trains by: what logits are made of where classes are asked for."""
    raw_scores: bool = False
    """Whether the score of a pair is the one logit itself, as the checkpoint says, and not its sigmoid."""
    dense: tuple[DenseModule, ...] = field(default=(), repr=False)
    """What the pooled vector goes through, in order, before it is normalised."""

    @property
    def asked(self) -> str:
        """How workers are asked for it (`SamplingParams.pooling`)."""
        return self.way + (DENSE if self.dense else "")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A checkpoint that was read and checked (`read_model_spec`). Lengths are in positions."""

    path: Path
    """The checkpoint's folder, or its GGUF file."""
    name: str
    """The served name: the last part of the path, for a Hugging Face snapshot its repository; `served_as` changes
    it."""
    architecture: str
    vocab_size: int
    layers: int
    context: int
    """The longest sequence that is served, prompt and answer together: `engine.context` where that is given."""
    dtype: str
    """The checkpoint's dtype: ``float32``, ``bfloat16`` or ``float16``."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """From `generation_config.json` where it has them, else from `config.json`; and the tokenizer's own end, which
    fine-tunes may have set alone. None is beyond the vocabulary."""
    fingerprint: str
    """Digest of architecture, numbers and tensors: two workers with different digests refuse each other."""
    generation_defaults: dict[str, float] = field(default_factory=dict)
    """`temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty` from `generation_config.json`, where given; of a
    GGUF file first from its own header."""
    warnings: tuple[str, ...] = field(default=(), kw_only=True, compare=False)
    """What its files say and can't mean, for the operator; it is left out."""
    aliases: tuple[str, ...] = field(default=(), kw_only=True)
    """Further names that clients may ask for."""
    quantization: Quantization = field(default=Quantization(), kw_only=True)
    pooling: Pooling = field(default=Pooling(), kw_only=True)
    """How it makes embeddings."""
    draft_model: str = field(default="", kw_only=True)
    """As `engine.draft_model`."""
    draft_head: ModelSpec | None = field(default=None, kw_only=True, repr=False)
    """The checkpoint that `draft_model` names, where it is a folder."""
    pictures: PictureSpec | None = field(default=None, kw_only=True)
    """How it takes pictures; None: it takes text alone."""
    weights: WeightsVersion | None = field(default=None, kw_only=True)
    """The weights that were put in place of the checkpoint's (`with_weights`); None: none were."""
    config: JsonFields = field(kw_only=True, repr=False, compare=False)
    """The keys of `config.json`; for a multimodal model with the text model's keys merged over the outer ones."""
    headers: Mapping[str, TensorHeader] = field(kw_only=True, repr=False, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that a request may give; answers carry the first."""
        return (self.name, *self.aliases)


def served_as(spec: ModelSpec, names: str) -> ModelSpec:
    """`spec` under `names`, separated by commas: the first is its name, the others aliases; unchanged without names."""
    given = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    return replace(spec, name=given[0], aliases=tuple(given[1:])) if given else spec


def _name_of(path: Path) -> str:
    """The folder's last part, or a file's without its suffix; for ``models--ORGANISATION--NAME/snapshots/HASH``, as
    downloads are kept, ``ORGANISATION/NAME``."""
    if is_gguf(path):
        return path.stem
    parts = path.resolve().parts
    if len(parts) >= 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/")
    return parts[-1]


def read_model_spec(path: Path, context: int = 0, draft_model: str = "") -> ModelSpec:
    """Read and check a checkpoint folder, or a GGUF file, without loading a tensor.

    `context`: the setting `engine.context`; 0: as long as the model declares. `draft_model`: as
    `engine.draft_model`. Raises `CheckpointError` in one line for a missing or truncated file, a missing or bad number,
    or a dtype that is not supported, and `ConfigError` for a context or draft model that there isn't.
    """
    if is_gguf(path):
        header = read_gguf(path)
        found = config_of(header)
        GgufTokenizer(header)  # A tokenizer that nobody here can build is refused now, not by the first who needs it.
        config, headers = JsonFields(path, found.values), found.tensors
        generation = _sampling_beside(path) | found.generation
    else:
        config, generation, headers = _read_folder(path)
    return with_draft_model(_spec(path, config, generation, headers, context), draft_model)


def with_draft_model(spec: ModelSpec, draft_model: str) -> ModelSpec:
    """`spec` of a model that is served with this `engine.draft_model`. Raises `ConfigError` for one that is none."""
    if not draft_model:
        return spec
    if draft_model == MTP:
        return replace(spec, draft_model=draft_model, fingerprint=f"{spec.fingerprint}-{draft_model}")
    folder = Path(draft_model).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"engine.draft_model must be {MTP}, or a folder that is there; got {draft_model!r}")
    head = _spec(folder, *_read_folder(folder), 0)
    named = f"{spec.fingerprint}-{head.fingerprint}"
    return replace(spec, draft_model=draft_model, draft_head=head, fingerprint=named)


def with_weights(spec: ModelSpec, weights: WeightsVersion | None, roots: str) -> ModelSpec:
    """`spec` with the tensors of another folder, which must have the checkpoint's names, shapes and dtypes; all else of
    the checkpoint stays. Reads all of the folder's tensors. `roots`: `engine.weight_roots`.

    Raises `CheckpointError` where the folder isn't allowed, has other tensors, or isn't that of the digest any more.
    """
    if weights is None or not weights.path:
        return replace(spec, weights=weights)
    folder = weights_folder(weights.path, roots)
    if is_gguf(spec.path):
        raise CheckpointError(f"{spec.path.name} is a GGUF file, whose weights can't be changed while it is served")
    headers = read_headers(folder)
    check_alike(folder, headers, spec.headers)
    digest = digest_files(headers)
    if weights.digest not in ("", digest):
        raise CheckpointError(
            f"{folder} has other files than those that the cluster has changed to as version {weights.version}: put "
            "these back, or change to what is there now (twinpool weights update)"
        )
    named = f"{spec.fingerprint}-{digest[:32]}"
    return replace(spec, headers=headers, fingerprint=named, weights=structs.replace(weights, digest=digest))


def spec_of_config(path: Path) -> ModelSpec:
    """The spec of a model of which there is only a `config.json`: without tensors. Raises as `read_model_spec` does."""
    return _spec(path.parent, JsonFields(path, _of_text(read_json(path))), {}, {}, 0)


def _spec(
    path: Path,
    config: JsonFields,
    generation: Mapping[str, object],
    headers: Mapping[str, TensorHeader],
    context: int,
) -> ModelSpec:
    quantization = read_quantization(config)
    architecture, dtype = _architecture(config), _dtype(config, headers)
    eos = generation.get("eos_token_id")
    ends = dict.fromkeys(_token_ids(eos if eos is not None else config.values.get("eos_token_id")))
    if (last := end_of_tokenizer(path)) is not None:
        ends[last] = None
    vocab_size = config.size("vocab_size")
    beyond = [end for end in ends if not 0 <= end < vocab_size]
    bos = generation.get("bos_token_id", config.values.get("bos_token_id"))
    served, notes = _context(config, context)
    identity = json.dumps([architecture, dtype, _numbers(config)], sort_keys=True, default=str)
    identity += rotated_for(config, served)
    pictures, blind = read_picture_spec(path, architecture) if headers else (None, "")
    pooling = _sized(read_pooling(path), config.peek(HIDDEN))
    identity += "".join(f"{one.tanh}{digest_samples(one.headers)}" for one in pooling.dense)
    return ModelSpec(
        path=path,
        name=_name_of(path),
        architecture=architecture,
        vocab_size=vocab_size,
        layers=config.size("num_hidden_layers", _listed_layers(config)),
        context=served,
        dtype=dtype,
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=tuple(end for end in ends if end not in beyond),
        fingerprint=hashlib.sha256((identity + digest_samples(headers)).encode()).hexdigest()[:32],
        generation_defaults={
            key: float(value)
            for key in _GENERATION_KEYS
            if isinstance(value := generation.get(key), int | float) and not isinstance(value, bool)
        },
        quantization=quantization,
        pictures=pictures,
        pooling=pooling,
        warnings=notes
        + ((blind,) if blind else ())
        + ((f"{path}: {quantization.note}",) if quantization.note else ())
        + ((f"{path}: eos_token_id {beyond} is left out: the vocabulary has {vocab_size} tokens",) if beyond else ()),
        config=config,
        headers=headers,
    )


def _context(config: JsonFields, wanted: int) -> tuple[int, tuple[str, ...]]:
    """The longest sequence that is served, and what the operator should know of it. Raises `ConfigError`."""
    limits, kind = context_limits(config), rope_kind(config)
    if wanted > limits.most:
        given = "has no rope scaling" if kind == "default" else f"has rope scaling {kind!r}"
        yarn = {"rope_type": "yarn", "factor": _factor(wanted, limits.trained), _TRAINED: limits.trained}
        scaling = f'"rope_scaling":{json.dumps(yarn, separators=(",", ":"))}'
        needs = "a file converted with yarn scaling" if is_gguf(config.path) else f"it to say, for instance, {scaling}"
        raise ConfigError(
            f"engine.context={wanted} is more than the {limits.most} tokens of {config.path}, which {given}; a longer "
            f"context needs {needs}"
        )
    if wanted == 1:
        raise ConfigError("engine.context=1 leaves no room for a prompt and an answer: set 2 or more, or 0")
    if kind == "dynamic" and limits.most > limits.usual and not wanted:
        return limits.usual, (
            f"{config.path}: rope scaling {kind!r} is for sequences of more than {limits.usual} tokens; "
            f"engine.context above that, up to {limits.most}, rotates all of them as for that length",
        )
    served = wanted or limits.usual
    if kind == "longrope" and rotated_for(config, served) != rotated_for(config, 1):
        return served, (
            f"{config.path}: rope scaling {kind!r}: all sequences are rotated by the long factors, since some may be "
            "longer than those of training; with engine.context of at most the length of training, by the short ones",
        )
    return served, ()


def _factor(wanted: int, trained: int) -> float:
    """The least factor, with at most one digit after the point, that makes `wanted` of `trained` positions."""
    return -(-10 * wanted // trained) / 10


def _read_folder(folder: Path) -> tuple[JsonFields, dict[str, object], dict[str, TensorHeader]]:
    """The keys of a folder's `config.json` and `generation_config.json`, and its tensors' headers."""
    if not folder.is_dir():
        what = "is a file that is no .gguf file" if folder.exists() else "does not exist"
        raise CheckpointError(f"checkpoint folder {folder} {what}")
    if not (folder / "config.json").exists():
        files = sorted(folder.glob(f"*{SUFFIX}"))
        hint = f"give its file {files[0].name}" if files else "is it a Hugging Face checkpoint folder?"
        raise CheckpointError(f"{folder} has no config.json; {hint}")
    config = JsonFields(folder / "config.json", _of_text(read_json(folder / "config.json")))
    generation_path = folder / GENERATION_CONFIG
    generation = read_json(generation_path) if generation_path.exists() else {}
    return config, generation, read_headers(folder)


def _sampling_beside(file: Path) -> dict[str, object]:
    """The sampling parameters of a `generation_config.json` beside a GGUF file; what the file itself says counts."""
    path = file.parent / GENERATION_CONFIG
    values = read_json(path) if path.exists() else {}
    return {key: values[key] for key in _GENERATION_KEYS if key in values}


def _of_text(values: Mapping[str, object]) -> dict[str, object]:
    """The keys of `config.json` with those of the text model over the outer ones; unchanged without a text model."""
    inner = next((values[key] for key in _TEXT_KEYS if isinstance(values.get(key), dict)), None)
    if inner is None:
        return dict(values)
    assert isinstance(inner, dict)
    nulls = {key: None for key, value in inner.items() if value is None}
    outer = {k: value for k, value in values.items() if not isinstance(value, dict) or k in _QUANTISATION_KEYS}
    given = {key: value for key, value in inner.items() if value is not None}
    # Of a model without a head of its own either flag says that it is tied; transformers goes by the outer one.
    tied = {"tie_word_embeddings": True} if values.get("tie_word_embeddings") is True else {}
    left_out = _LEFT_OUT.get(str(inner.get("model_type")), {})
    return nulls | left_out | outer | given | tied | {"architectures": values.get("architectures")}


def _numbers(config: JsonFields) -> dict[str, object]:
    """All keys of `config.json` that the computation depends on, in one spelling, for the fingerprint."""
    values = {k: v for k, v in config.values.items() if not k.startswith("_") and k not in (*_SPELLINGS, *_NOISE)}
    rope = dict(config.table("rope_scaling") or config.table("rope_parameters"))
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.setdefault("rope_theta", config.values.get("rope_theta"))
    return values | {"rope": {k: v for k, v in rope.items() if v is not None} | {"rope_type": kind}}


def _architecture(config: JsonFields) -> str:
    names = config.values.get("architectures")
    name = names[0] if isinstance(names, list) and names else config.values.get("model_type")
    return str(name) if name else "not given"


def _dtype(config: JsonFields, headers: Mapping[str, TensorHeader]) -> str:
    declared = config.values.get("dtype") or config.values.get("torch_dtype")
    if declared is None:
        header = next((h for name, h in headers.items() if name.endswith("embed_tokens.weight")), None)
        declared = FLOATS.get(header.dtype, header.dtype) if header else "float32"
    name = str(declared).removeprefix("torch.")
    if name not in FLOATS.values():
        raise CheckpointError(
            f"{config.path}: dtype {name} is not supported; supported are {', '.join(FLOATS.values())}"
        )
    return name


def _listed_layers(config: JsonFields) -> int | None:
    """The number of layers where `config.json` lists their kinds one by one instead; else None."""
    kinds = config.values.get("layers_block_type", config.values.get("hybrid_override_pattern"))
    return len(kinds) if isinstance(kinds, list | str) and kinds else None


def _token_ids(value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool))


def read_pooling(path: Path) -> Pooling:
    """Read how a checkpoint's folder, or its GGUF file, makes embeddings, as the files of sentence-transformers beside
    it say: `modules.json` lists what follows the model, a pooling, whose `config.json` names the way, and perhaps
    `Dense` modules and a normalisation. Without it: by the last token, normalised. Those that can't be read are a
    refusal: all else is served all the same. Raises `CheckpointError` for a `config.json` that can't be read."""
    modules, config = path / "modules.json", path / "config.json"
    said = read_json(config) if config.exists() else {}
    try:
        pooling = _pooling(modules) if modules.exists() else Pooling()
    except CheckpointError as error:
        pooling = Pooling(refusal=str(error))
    pooling = _classified(said, pooling)
    words = said.get(JUDGE)
    if isinstance(words, list) and len(words) == 2 and all(isinstance(word, str) for word in words):
        return replace(pooling, judge=(words[0], words[1]))
    return pooling


def _pooling(modules: Path) -> Pooling:
    listed = read_tree(modules)
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise CheckpointError(f"{modules} must hold a list of modules")
    kinds = [str(one.get("type")).rpartition(".")[2] for one in listed]
    folders = [modules.parent / str(one.get("path", "")) for one in listed]
    pooling = Pooling(normalise="Normalize" in kinds)
    if others := sorted(set(kinds) - {*_MODULES}):
        return replace(pooling, refusal=f"modules of it aren't supported: {', '.join(others)}")
    places = [_MODULES.index(kind) for kind in kinds]
    if places != sorted(places) or any(kinds.count(kind) > 1 for kind in _MODULES if kind != "Dense"):
        order = ", ".join(_MODULES)
        return replace(pooling, refusal=f"its modules are {', '.join(kinds)}, and supported is the order {order}")
    if "Pooling" in kinds:
        pooling = _pooled_by(read_json(folders[kinds.index("Pooling")] / "config.json"), pooling)
    dense = tuple(_dense(folder) for kind, folder in zip(kinds, folders, strict=True) if kind == "Dense")
    return replace(pooling, dense=dense)


def _pooled_by(found: Mapping[str, object], pooling: Pooling) -> Pooling:
    """`pooling` with the way that a ``1_Pooling/config.json`` names, by the key of today or by the flags of before."""
    named = found.get("pooling_mode")
    if named is None:
        flag = "pooling_mode_"
        named = [key.removeprefix(flag) for key, on in found.items() if key.startswith(flag) and on is True] or "mean"
    modes = [str(mode) for mode in named] if isinstance(named, list) else [str(named)]
    ways = [_WAYS.get(mode, mode) for mode in modes]
    if len(ways) != 1 or ways[0] not in POOLINGS:
        refusal = f"it pools by {' and '.join(ways) or 'nothing'}, not by one of {', '.join(POOLINGS)}"
    elif ways[0] == "mean" and found.get("include_prompt") is False:
        refusal = "it leaves prompts out of its mean (include_prompt), and texts come with theirs in one"
    else:
        return replace(pooling, way=ways[0])
    return replace(pooling, refusal=refusal)


def _classified(said: Mapping[str, object], pooling: Pooling) -> Pooling:
    """`pooling` with the classes that a `config.json` names, by transformers' rules; without any for other models."""
    names, labels = said.get("architectures"), said.get("id2label")
    if not (isinstance(names, list) and names and str(names[0]).endswith(CLASSIFIER)):
        return pooling
    named = labels if isinstance(labels, dict) else {}
    count = len(named) or said.get("num_labels", 2)
    places = range(min(count, _MOST_LABELS) if isinstance(count, int) and count > 0 else 2)
    inner, old = said.get("sentence_transformers"), said.get("sbert_ce_default_activation_function")
    activation = str(inner.get("activation_fn") or old if isinstance(inner, dict) else old).rpartition(".")[2]
    if activation not in ("", "None", "Identity", "Sigmoid"):
        pooling = replace(pooling, refusal=f"its scores go through {activation}; supported are Identity and Sigmoid")
    return replace(
        pooling,
        labels=tuple(str(named.get(str(at), f"LABEL_{at}")) for at in places),
        problem=str(said.get("problem_type") or ""),
        raw_scores=activation == "Identity",
    )


def _sized(pooling: Pooling, hidden: object) -> Pooling:
    """`pooling`, refused where its `Dense` modules don't take what comes to them: [hidden], then what each makes."""
    given = [hidden, *(one.outputs for one in pooling.dense)][:-1]
    taken = [one.inputs for one in pooling.dense]
    if taken == given:
        return pooling
    return replace(pooling, dense=(), refusal=f"its Dense modules take {taken} numbers and are given {given}")


def _dense(folder: Path) -> DenseModule:
    """Read a module `Dense`, but for its tensors. Raises `CheckpointError`."""
    config = JsonFields(folder / "config.json", read_json(folder / "config.json"))
    activation = config.text("activation_function", "Tanh").rpartition(".")[2]
    if activation not in ("Identity", "Tanh"):
        raise config.refuse(f"activation_function {activation!r} is not supported; supported are Identity, Tanh")
    inputs, outputs = config.size("in_features"), config.size("out_features")
    vector = "sentence_embedding"
    names = {config.text(key, vector) for key in ("module_input_name", "module_output_name")}
    if names != {vector} or config.flag("use_residual"):
        raise config.refuse(f"it must make {vector} of {vector}, without use_residual")
    if not (folder / SINGLE).exists():
        raise CheckpointError(f"{folder} has no {SINGLE}; weights of Dense are read from safetensors alone")
    bias, headers = config.flag("bias", True), read_file_headers(folder / SINGLE)
    wanted = {"linear.weight": (outputs, inputs)} | ({"linear.bias": (outputs,)} if bias else {})
    shapes = {name: header.shape for name, header in headers.items()}
    if shapes != wanted:
        raise CheckpointError(f"{folder / SINGLE} has tensors {shapes}, and its config.json is of {wanted}")
    return DenseModule(headers, inputs, outputs, bias, activation == "Tanh")
