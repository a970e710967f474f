"""Adapters (LoRA) as PEFT writes them: a folder with `adapter_config.json` and `adapter_model.safetensors`.

For some linear layers of a model an adapter has two factors, A [r, k] and B [n, r]. Such a layer computes W·x + s·B·A·x
then, where s is alpha / r, or alpha / sqrt(r) with ``use_rslora``. What else an adapter may be is refused by the name
of its field or tensor: nothing of it is left out silently.

A folder is read as a whole, and its digest is of the very bytes that were read. State and requests name an adapter by
that digest, so a folder whose files change is another adapter, whatever its name.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinpool.contracts.checkpoint.json_fields import JsonFields
from twinpool.contracts.checkpoint.safetensors_headers import FLOATS, TensorHeader, check_regular, read_file_headers
from twinpool.contracts.errors import CheckpointError
from twinpool.contracts.outside_data import read_json
from twinpool.contracts.sampling_params import AdapterRef

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MAX_FILE_BYTES = 8 << 30
_PREFIX = "base_model.model."
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,126}")
_READ = "bias peft_type r lora_alpha use_rslora rank_pattern alpha_pattern target_modules init_lora_weights"
_OF_TRAINING = (
    "auto_mapping base_model_name_or_path inference_mode layers_pattern layers_to_transform loftq_config lora_dropout "
    "megatron_core peft_version qalora_group_size revision exclude_modules task_type ensure_weight_tying eva_config "
    "lora_ga_config runtime_config"
)
_TAKEN = frozenset(f"{_READ} {_OF_TRAINING}".split())
"""Fields that are read here, and those that say how an adapter was trained and change nothing once it is."""
_REFUSED = {
    "use_dora": "DoRA scales whole columns of the weights",
    "modules_to_save": "whole modules in place of the model's",
    "lora_bias": "biases beside the factors",
    "target_parameters": "factors of parameters that are no linear layers, such as experts",
    "trainable_token_indices": "rows of the embedding",
    "fan_in_fan_out": "transposed weights",
    "layer_replication": "layers that are there several times",
}
_NAME_CHARS, _PATTERN_CHARS, _MAX_QUANTIFIERS = 128, 1024, 3
_QUANTIFIERS, _REPEATED = re.compile(r"[*+{]"), re.compile(r"\)[*+{]")
"""What repeats something in a pattern; and a group that is repeated, with which matching may take for ever."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Ways to begin (`init_lora_weights`) that change the model's own weights, which an adapter's files don't have."""


@dataclass(frozen=True, slots=True)
class AdapterFactors:
    """Where the two factors of one layer are, and what their product is multiplied with."""

    down: TensorHeader
    """A [r, k]."""
    up: TensorHeader
    """B [n, r]."""
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter's folder, checked as far as no model is needed for that."""

    path: Path
    digest: str
    """SHA-256 of both files, in hex."""
    tensors_digest: bytes
    """SHA-256 of the file of tensors alone."""
    factors: Mapping[str, AdapterFactors]
    """By the name of the layer, such as ``model.layers.0.self_attn.q_proj``, as the model's class names it."""


def check_name(name: str) -> str:
    """Return why an adapter can't have this name; empty where it can."""
    if _NAME.fullmatch(name):
        return ""
    return (
        f"an adapter's name has 1 to 127 letters, digits and any of ._/:@-, a letter or digit first; got {name[:80]!r}"
    )


def allowed_folder(path: str, roots: Sequence[str]) -> Path:
    """Return an adapter's folder with all links followed. Raises `CheckpointError` where it or one of its files lies
    below none of `roots`.

    What isn't allowed is refused in the same words whether or not there is anything.
    """
    if not path.startswith("/") or not path.isprintable():
        raise CheckpointError(f"an adapter's folder is named by an absolute path; got {path[:200]!r}")
    folder = Path(path)
    try:
        above = [Path(root).resolve() for root in roots]
        places = [place.resolve() for place in (folder, folder / CONFIG, folder / TENSORS)]
    except (OSError, RuntimeError, ValueError):
        places = []
    if not places or not all(any(place.is_relative_to(root) for root in above) for place in places):
        raise CheckpointError(f"{path[:200]} lies below none of adapters.roots, and isn't one of adapters.load")
    return places[0]


def adapter_ref(name: str, path: str, roots: Sequence[str], max_rank: int) -> AdapterRef:
    """Look at an adapter that is to be served under `name`. Reads all of its files. Raises `CheckpointError`."""
    if wrong := check_name(name):
        raise CheckpointError(wrong)
    return AdapterRef(name, read_adapter_files(allowed_folder(path, roots), max_rank).digest, path)


def read_adapter_files(folder: Path, max_rank: int) -> AdapterFiles:
    """Read and check an adapter's folder, whose ranks are `max_rank` at most. Raises `CheckpointError` naming the file,
    field or tensor at fault."""
    raw = _bytes_of(folder / CONFIG, 1 << 20)
    try:
        values = read_json(raw)
    except ValueError as error:
        raise CheckpointError(f"{folder / CONFIG} is not JSON: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{folder / CONFIG} must hold a JSON object")
    fields = JsonFields(folder / CONFIG, values)
    _check_fields(fields)
    headers = read_file_headers(folder / TENSORS)
    tensors = _file_digest(folder / TENSORS)
    digest = hashlib.sha256(b"twinpool adapter 1\n" + hashlib.sha256(raw).digest() + tensors).hexdigest()
    return AdapterFiles(folder, digest, tensors, _factors(fields, headers, max_rank))


def _bytes_of(path: Path, most: int) -> bytes:
    check_regular(path)
    try:
        with path.open("rb") as file:
            raw = file.read(most + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    if len(raw) > most:
        raise CheckpointError(f"{path} has more than {most} bytes")
    return raw


def _file_digest(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CheckpointError(f"{path} has more than {MAX_FILE_BYTES} bytes")
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None


def _check_fields(fields: JsonFields) -> None:
    """Refuse what isn't a plain LoRA."""
    values = fields.values
    if values.get("peft_type") != "LORA":
        raise fields.refuse(f"peft_type {values.get('peft_type')!r} is not supported; only LORA is")
    if values.get("bias", "none") != "none":
        raise fields.refuse(f"bias {values['bias']!r} is not supported: adapters here have no biases")
    began = values.get("init_lora_weights")
    if isinstance(began, str) and began.lower().startswith(_CHANGES_BASE):
        raise fields.refuse(f"init_lora_weights {began!r} is not supported: it changes the model's own weights")
    for name, value in values.items():
        if name in _TAKEN or not value:
            continue
        why = _REFUSED.get(name, "it isn't known here")
        raise fields.refuse(f"{name} is not supported: {why}")


def _factors(fields: JsonFields, headers: Mapping[str, TensorHeader], most: int) -> dict[str, AdapterFactors]:
    """Return the factors by layer."""
    pairs: dict[str, dict[str, TensorHeader]] = {}
    for name, header in headers.items():
        layer, _, kind = name.removeprefix(_PREFIX).rpartition(".lora_")
        if not name.startswith(_PREFIX) or kind not in ("A.weight", "B.weight") or not layer:
            raise fields.refuse(f"tensor {name} is not supported: only lora_A.weight and lora_B.weight of layers are")
        if header.dtype not in FLOATS or len(header.shape) != 2:
            raise fields.refuse(f"tensor {name} is {header.dtype} {list(header.shape)}; factors are matrices of floats")
        pairs.setdefault(layer, {})[kind[0]] = header
    if not pairs:
        raise fields.refuse(f"{TENSORS} has no factors")
    found = {}
    for layer, both in sorted(pairs.items()):
        if len(both) < 2:
            raise fields.refuse(f"{layer} has lora_{next(iter(both))}.weight without the other factor")
        _check_targeted(fields, layer)
        rank = _by_pattern(fields, "rank_pattern", layer, fields.size("r"))
        down, up = both["A"], both["B"]
        if (down.shape[0], up.shape[1]) != (rank, rank):
            shapes = f"{list(down.shape)} and {list(up.shape)}"
            raise fields.refuse(f"{layer}: its factors are {shapes}, and the rank is {rank}")
        if rank > most:
            raise fields.refuse(f"{layer}: its rank {rank} is above adapters.max_rank={most}")
        alpha = _by_pattern(fields, "alpha_pattern", layer, fields.number("lora_alpha", 8.0))
        scale = alpha / (math.sqrt(rank) if fields.flag("use_rslora") else rank)
        if not math.isfinite(scale):
            raise fields.refuse(f"{layer}: its lora_alpha is {alpha:g}")
        found[layer] = AdapterFactors(down, up, scale)
    return found


def _check_targeted(fields: JsonFields, layer: str) -> None:
    """Refuse factors of a layer that `target_modules` leaves out: PEFT wouldn't use them."""
    wanted = fields.values.get("target_modules")
    names: Sequence[Any] = [wanted] if isinstance(wanted, str) else wanted if isinstance(wanted, list) else ()
    if isinstance(wanted, str):
        hit = wanted == "all-linear" or _matches(wanted, layer)
    else:
        hit = any(layer == name or layer.endswith(f".{name}") for name in names)
    if names and not hit:
        raise fields.refuse(f"{layer} has factors, and target_modules leaves it out")


def _by_pattern(fields: JsonFields, key: str, layer: str, usual: float) -> float:
    """Return the entry of `rank_pattern` or `alpha_pattern` for a layer: of the first pattern that its end matches."""
    patterns = fields.values.get(key) or {}
    if not isinstance(patterns, dict):
        raise fields.refuse(f"{key} must be an object")
    for pattern, value in patterns.items():
        if _matches(pattern, layer, before=r"(.*\.)?"):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise fields.refuse(f"{key} gives {layer} {value!r}, which is no positive number")
            return value
    return usual


def _matches(pattern: str, layer: str, before: str = "") -> bool:
    """Whether a pattern of the files matches a layer's name, behind what `before` matches. Who trained an adapter wrote
    it, and matching can't be ended: patterns that could take long are refused."""
    if len(layer) > _NAME_CHARS or len(pattern) > _PATTERN_CHARS or _REPEATED.search(pattern):
        raise CheckpointError(f"the pattern {pattern[:80]!r} is too elaborate for {layer[:80]!r}")
    if len(_QUANTIFIERS.findall(pattern)) > _MAX_QUANTIFIERS:
        raise CheckpointError(f"the pattern {pattern[:80]!r} repeats more than {_MAX_QUANTIFIERS} things")
    try:
        return re.fullmatch(f"{before}({pattern})", layer) is not None
    except (re.error, OverflowError, RecursionError):
        raise CheckpointError(f"{pattern[:80]!r} is no regular expression") from None
