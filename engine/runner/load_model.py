"""Loading of a model, with the kernels, numerics and attention backend that the configuration names.

What is loaded (`LoadedModel`) knows no pool: a process that goes on in another role keeps it (`KeptModel`), and binds
it to the pools of the next worker. On a CPU the workers of a node share its image (`engine.runner.model_image`).
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from twinpool.cache.device.device_port import Device
from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.cache.pool.page_allocator import EpochTable
from twinpool.cache.pool.pool_set import LoadGate
from twinpool.contracts.build_id import build_id
from twinpool.contracts.checkpoint.gguf.gguf_header import is_gguf
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import CheckpointError, ConfigError
from twinpool.contracts.messages.rank_order_codec import OrderChannel
from twinpool.engine.layers.decoder import Decoder
from twinpool.engine.layers.moe.expert_group import ExpertGroup
from twinpool.engine.models.model_base import Model
from twinpool.engine.native import current_kernels
from twinpool.engine.runner.kernel_choice import (
    attention_for,
    check_inputs,
    check_state,
    class_of,
    dtype_for,
    inputs_of,
    kernels_for_config,
    wants_triton,
    weights_kept,
)
from twinpool.engine.runner.model_image import ImageUnfit, ModelImages, image_of, model_of
from twinpool.engine.runner.model_runner import ModelRunner
from twinpool.engine.tensors.row_exact_linear import FAST, TILE_ROWS, Numerics, probe
from twinpool.engine.tensors.shard import WHOLE, Shard
from twinpool.engine.tensors.tensor_parallel import ALONE, TensorParallelGroup
from twinpool.engine.tensors.weight_loader import Weights

log = logging.getLogger("twinpool.engine")


@dataclass(frozen=True)
class LoadedModel:
    """One rank's weights in memory, and how products with them are computed."""

    decoder: Decoder
    numerics: Numerics
    key: tuple[Any, ...]
    """All that shapes it (`model_key`): with an equal key, what is loaded again is the same."""
    image: str = ""
    """The key of the image that its weights lie in, where the node's processes share it; empty where they don't."""


class KeptModel:
    """The model that a process keeps in memory from one of its workers to the next."""

    def __init__(
        self,
        images: ModelImages | None = None,
        run: Callable[[Callable[[], LoadedModel]], LoadedModel] | None = None,
    ) -> None:
        """`images`: where the node's processes share models. `run` calls what loads one, on another thread perhaps, for
        models of one rank on a CPU: which card is the current one is a thread's own matter. None: it is called here."""
        self._images, self._run = images, run or _here
        self._loaded: LoadedModel | None = None
        self._next: LoadedModel | None = None
        """The model that is to follow the one in use (`prepare`)."""
        self._asked: tuple[EngineConfig, torch.device, TensorParallelGroup, Shard] | None = None
        """With what the latest model was asked for."""
        self._lock = threading.Lock()
        self.loads = 0
        """How often a model was loaded, or its image mapped."""

    def get(
        self,
        model: Model,
        config: EngineConfig,
        device: torch.device,
        ranks: TensorParallelGroup,
        shard: Shard = WHOLE,
    ) -> LoadedModel:
        """The model that is kept, if it is the one asked for; else it is freed, and the other one loaded. Raises as
        `load_model`."""
        key = model_key(model, config, device, shard)
        with self._lock:
            self._asked, prepared = (config, device, ranks, shard), self._next
            self._next = None
            if self._loaded is None or self._loaded.key != key:
                self._loaded = prepared if prepared is not None and prepared.key == key else None
            if self._loaded is None:  # Freed first, as there may be no room for two.
                prepared = None
                self._loaded = self._load(model, *self._asked)
            if self._images is not None:
                self._images.use_only(self._loaded.image)
            return self._loaded

    def prepare(self, model: Model) -> None:
        """Load a model beside the one in use, to be taken by the next `get` that asks for it. Several ranks load
        together, which they can't while they serve: there it is loaded by `get`. Raises as `load_model`."""
        with self._lock:
            if self._asked is None or self._asked[2].size > 1:
                return
            config, device, _, shard = self._asked
            key = model_key(model, config, device, shard)
            if key not in [one.key for one in (self._loaded, self._next) if one is not None]:
                self._next = None
                self._next = self._load(model, *self._asked)

    def forget_prepared(self) -> None:
        """Free the model that was prepared. Idempotent."""
        with self._lock:
            self._next = None
            if self._images is not None and self._loaded is not None:
                self._images.use_only(self._loaded.image)

    def _load(
        self, model: Model, config: EngineConfig, device: torch.device, ranks: TensorParallelGroup, shard: Shard
    ) -> LoadedModel:
        run = self._run if device.type == "cpu" and ranks.size == 1 else _here
        self.loads += 1
        return run(lambda: load_model(model, config, device, ranks, self._images, shard))


def _here(load: Callable[[], LoadedModel]) -> LoadedModel:
    return load()


def model_key(model: Model, config: EngineConfig, device: torch.device, shard: Shard) -> tuple[Any, ...]:
    """All that a loaded model depends on: the checkpoint, how it is computed with and where, and this rank's part."""
    spec = model.spec
    return (
        str(spec.path),
        spec.fingerprint,
        type(model),
        dtype_for(spec, config),
        replace(config, share_weights="auto"),  # Wherever weights lie, they are the same.
        device,
        shard,
    )


def load_model(
    model: Model,
    config: EngineConfig,
    device: torch.device,
    ranks: TensorParallelGroup = ALONE,
    images: ModelImages | None = None,
    shard: Shard = WHOLE,
) -> LoadedModel:
    """Load the checkpoint of `model`, or map what another process of this node has loaded.

    Each of several `ranks` loads its `shard`, and all must call this at the same time. Sets torch's threads to
    `config.threads` unless that is 0. Raises `CheckpointError` for a checkpoint that can't be read and `ConfigError`
    for kernels that can't be had on this device, or for weights that must be shared and can't.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    key, image = model_key(model, config, device, shard), ""
    if images is not None and config.share_weights != "off" and device.type == "cpu":
        image = _image_key(model, config, device, key)
        decoder, numerics = _shared(model, config, device, shard, image, images)
    else:
        decoder, numerics = _read(model, config, device, shard)
    _return_free_memory()
    return LoadedModel(decoder, agreed(numerics, ranks, device), key, image)


def check_finite(spec: ModelSpec) -> None:
    """Read all tensors of a checkpoint, one after the other. Raises `CheckpointError` where one can't be read, or has a
    value that isn't finite: every answer would be of such values."""
    names: dict[Path, list[str]] = {}
    for name, header in spec.headers.items():
        names.setdefault(header.file, []).append(name)
    for path, held in names.items():
        try:
            with safe_open(path, framework="pt") as file:
                for name in held:
                    tensor = file.get_tensor(name)
                    if tensor.is_floating_point() and not _finite(tensor):
                        raise CheckpointError(f"{path}: the tensor {name} has values that aren't finite")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from None


def _finite(tensor: Tensor) -> bool:
    return bool((tensor.float() if tensor.element_size() == 1 else tensor).isfinite().all())


def _return_free_memory() -> None:
    """Return the memory to the system that loading has freed: glibc keeps what lies between weights in the heap, which
    is up to half as much as they take."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _read(model: Model, config: EngineConfig, device: torch.device, shard: Shard) -> tuple[Decoder, Numerics]:
    """Load a rank's weights from the checkpoint, and find how its products are computed."""
    kernels = kernels_for_config(config, device)
    dtype, triton = dtype_for(model.spec, config), wants_triton(config, device)
    gpu, gguf = device.type != "cpu", is_gguf(model.spec.path)
    keep = weights_kept(config, gpu=gpu, gguf=gguf, torch_alone=kernels is None)
    inputs = inputs_of(config, model.spec.quantization, gpu=gpu)
    weights = Weights(model.spec, dtype, device, shard, triton=triton, keep=keep, inputs=inputs)
    try:
        with current_kernels.using(kernels):
            decoder = model.build(weights)
            check_inputs(config, weights.linears, model.spec.name)
        decoder.kernels, decoder.mixtures = kernels, [one for one in weights.mixtures if one.spread]
        decoder.routes = bool(weights.mixtures)
    finally:
        weights.close()
    return decoder, numerics_for(weights, config, device)


def _shared(
    model: Model,
    config: EngineConfig,
    device: torch.device,
    shard: Shard,
    digest: str,
    images: ModelImages,
) -> tuple[Decoder, Numerics]:
    """Map the model's image, which `digest` names; where this process is the first to load it, write that. A model that
    can't be shared is this process's own, unless sharing is required."""
    kernels = kernels_for_config(config, device)
    try:
        image = images.find(digest)
        if image is not None:
            return model_of(image, kernels)
    except ImageUnfit as error:
        _must_not(config, str(error))
        return _read(model, config, device, shard)
    decoder, numerics = _read(model, config, device, shard)
    try:
        unwritten = image_of(decoder, numerics)
    except ImageUnfit as error:
        images.give_up(digest, str(error))
        _must_not(config, str(error))
        return decoder, numerics
    try:
        return model_of(images.keep(digest, unwritten), kernels)
    except ImageUnfit as error:
        _must_not(config, str(error))
        return _read(model, config, device, shard)  # What was read is emptied.


def _image_key(model: Model, config: EngineConfig, device: torch.device, key: tuple[Any, ...]) -> str:
    computed_by = class_of(config, dtype_for(model.spec, config), device, is_gguf(model.spec.path))
    return hashlib.blake2b(f"{build_id()} {computed_by} {key!r}".encode(), digest_size=16).hexdigest()


def _must_not(config: EngineConfig, reason: str) -> None:
    """Raise `ConfigError` where a process must not have weights of its own."""
    if config.share_weights == "on":
        raise ConfigError(f"engine.share_weights=on, and this worker's weights can't be shared: {reason}")
    log.warning("this worker has weights of its own", extra={"reason": reason})


def load_engine(
    model: Model,
    config: EngineConfig,
    spec: PoolSetSpec,
    gates: Mapping[str, LoadGate],
    epochs: Mapping[str, EpochTable],
    device: Device,
    ranks: TensorParallelGroup = ALONE,
    followers: OrderChannel | None = None,
    kept: KeptModel | None = None,
    shard: Shard = WHOLE,
    experts: ExpertGroup | None = None,
) -> ModelRunner:
    """Load the checkpoint of `model`, or take the one that is `kept`, and bind it to `gates`, whose buffers are those
    of `spec`, its pool set.

    All of several `ranks` must call this at the same time; the leader sends orders to its `followers`. `shard`: the
    part of the model that this rank holds. `experts`: those with which its experts are shared. `epochs` are the epoch
    tables of the allocators that hand out the pools' pages and slots, by pool. Raises as `load_model`, and
    `ConfigError` for an attention backend, or state, that can't be had on this device.
    """
    torch_device = device.torch_device
    triton = wants_triton(config, torch_device)
    check_state(spec, torch_device, triton=triton)
    loaded = (kept or KeptModel()).get(model, config, torch_device, ranks, shard)
    decoder, numerics = loaded.decoder, loaded.numerics
    attention = attention_for(config, numerics, torch_device, decoder.kernels)
    return ModelRunner(
        decoder, numerics, attention, spec, gates, epochs, device, ranks=ranks, followers=followers, experts=experts,
        triton=triton,
    )  # fmt: skip


def numerics_for(weights: Weights, config: EngineConfig, device: torch.device) -> Numerics:
    """Find how products are computed here, by probing the model's own shapes unless `config.numerics` is ``fast``.

    Attention's batched products are torch's only where it isn't Triton's.
    """
    if config.numerics == "fast":
        return FAST
    products = () if weights.triton else sorted(set(weights.products))
    with torch.inference_mode():
        found = probe(weights.linears, products, device)
    if found.tiled:
        log.warning(
            "rows of products are exact only in tiles of %d here: a step computes as many rows, and a prompt reads "
            "each weight as often as it has tiles; install a C++ compiler for kernels without tiles, or set "
            "engine.numerics=fast where rounding may differ attention=%s",
            TILE_ROWS, config.attention,
        )  # fmt: skip
    return found


def agreed(numerics: Numerics, ranks: TensorParallelGroup, device: torch.device) -> Numerics:
    """The numerics that suit every rank's products, so that all ranks pad alike. A collective: every rank calls it."""
    mine = torch.tensor([numerics.tiled, numerics.quantum], device=device)
    tiled, quantum = max(found.tolist() for found in ranks.gather(mine, loading=True))
    return Numerics(quantum, bool(tiled), numerics.invariant)
