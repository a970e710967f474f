"""Loading of a model, with the kernels, numerics and attention backend that the configuration names."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cache.device.device_port import Device
from cache.memory.kv_cache_spec import PoolSetSpec
from cache.pool.epoch_table import EpochTable
from cache.pool.load_gate import LoadGate
from contracts.config.worker_config import EngineConfig
from contracts.messages.rank_order_codec import OrderChannel
from engine.models.model_base import Model
from engine.native import current_kernels
from engine.runner.kernel_choice import attention_for, check_state, kernels_for_config, wants_triton
from engine.runner.model_runner import ModelRunner
from engine.tensors.row_exact_linear import FAST, Numerics, probe
from engine.tensors.shard import Shard
from engine.tensors.tensor_parallel import ALONE, TensorParallelGroup
from engine.tensors.weight_loader import Weights, dtype_for


def load_engine(
    model: Model,
    config: EngineConfig,
    spec: PoolSetSpec,
    gates: Mapping[str, LoadGate],
    epochs: Mapping[str, EpochTable],
    device: Device,
    ranks: TensorParallelGroup = ALONE,
    followers: OrderChannel | None = None,
) -> ModelRunner:
    """Load the checkpoint of `model` and bind it to `gates`, whose buffers are those of `spec`, its pool set.

    Each of several `ranks` loads its part, and all must call this at the same time; the leader sends orders to its
    `followers`. `epochs` are the epoch tables of the allocators that hand out the pools' pages and slots, by pool.
    Sets torch's threads to `config.threads` unless that is 0. Raises `CheckpointError` for a checkpoint that can't be
    read and `ConfigError` for an attention backend, or state, that can't be had on this device.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    torch_device = device.torch_device
    triton = wants_triton(config, torch_device)
    if triton:
        check_state(spec, torch_device)
    kernels = kernels_for_config(config, torch_device)
    shard = Shard(ranks.rank, ranks.size)
    weights = Weights(model.spec, dtype_for(model.spec, config), torch_device, shard, triton=triton)
    try:
        with current_kernels.using(kernels):
            decoder = model.build(weights)
        decoder.kernels = kernels
    finally:
        weights.close()
    numerics = agreed(numerics_for(weights, config, torch_device), ranks, torch_device)
    attention = attention_for(config, numerics, torch_device, kernels)
    return ModelRunner(
        decoder, numerics, attention, spec, gates, epochs, device, ranks=ranks, followers=followers, triton=triton
    )


def numerics_for(weights: Weights, config: EngineConfig, device: torch.device) -> Numerics:
    """Find how products are computed here, by probing the model's own shapes unless `config.numerics` is ``fast``.

    Attention's batched products are torch's only where it isn't Triton's.
    """
    if config.numerics == "fast":
        return FAST
    products = () if weights.triton else sorted(set(weights.products))
    with torch.inference_mode():
        return probe(weights.linears, products, device)


def agreed(numerics: Numerics, ranks: TensorParallelGroup, device: torch.device) -> Numerics:
    """The numerics that suit every rank's products, so that all ranks pad alike. A collective: every rank calls it."""
    mine = torch.tensor([numerics.tiled, numerics.quantum], device=device)
    tiled, quantum = max(found.tolist() for found in ranks.gather(mine))
    return Numerics(quantum, bool(tiled), numerics.invariant)
