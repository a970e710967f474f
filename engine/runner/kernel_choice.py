"""The choice of kernels (torch, C++ or Triton) and of how weights are kept, by configuration and device, and the
numerics class that follows."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from functools import cache
from importlib import metadata

import torch

from twinpool.cache.device.device_choice import device_capability
from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.contracts import cpu_levels as processor
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.checkpoint.quantization import Quantization
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import ConfigError
from twinpool.engine.attention.attention_backend import AttentionBackend
from twinpool.engine.attention.kv_quantization import quantised_buffers
from twinpool.engine.attention.torch_backend.torch_attention import NativeAttention, TorchAttention
from twinpool.engine.native import compile_kernels, current_kernels, native_kernels
from twinpool.engine.native.current_kernels import LayerKernels
from twinpool.engine.runner.numerics_class import code_digest, numerics_class
from twinpool.engine.tensors.row_exact_linear import Numerics, RowExactLinear
from twinpool.engine.weight_formats.block_weight import Inputs

log = logging.getLogger(__name__)
_CPU = torch.device("cpu")
_FLOAT8_CAPABILITY = 89
"""The least compute capability, times 10, for which Triton compiles float8 (e4m3)."""


def dtype_for(spec: ModelSpec, config: EngineConfig) -> torch.dtype:
    """The dtype to compute in: the configured one, or the checkpoint's own with ``auto``.

    A float16 checkpoint computes in float32 unless told otherwise: float16 overflows where bfloat16 and float32
    don't, and it is slow on CPUs.
    """
    name = spec.dtype if config.dtype == "auto" else config.dtype
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def kernels_for_config(config: EngineConfig, device: torch.device) -> LayerKernels | None:
    """The kernels of layers: those in Triton, those in C++, or None where the configuration asks for torch alone.

    Where those in C++ can't be compiled or loaded, ``auto`` warns and falls back to torch (None), and ``native`` raises
    `ConfigError`. Raises `ConfigError` where Triton's are wanted and can't run.
    """
    if wants_triton(config, device):
        _check_triton(device)
        from twinpool.engine.gpu.gpu_kernels import GpuKernels

        return GpuKernels(products=config.numerics == "invariant")
    if config.attention not in {"auto", "native"} or device.type != "cpu":
        return None
    try:
        return current_kernels.available(native_level(config))
    except compile_kernels.NativeUnavailable as error:
        if config.attention == "native":
            raise ConfigError(f"engine.attention=native: {error}; set engine.attention=torch") from None
        log.warning("computing with torch alone, slower than with the CPU kernels reason=%s", error)
        return None


def native_level(config: EngineConfig) -> str:
    """What the C++ kernels are compiled for: this machine; with its level's bits where the class is set to a level."""
    return compile_kernels.MACHINE if config.numerics_class == "auto" else compile_kernels.COMMON


def kernels_name(config: EngineConfig, device: torch.device) -> str:
    """The kind of kernels that compute here: ``torch``, ``native`` (C++) or ``triton``. State that one kind computed
    differs in its bits from another kind's."""
    if wants_triton(config, device):
        return "triton"
    if config.attention == "torch" or device.type != "cpu":
        return "torch"
    try:
        current_kernels.available(native_level(config))
    except compile_kernels.NativeUnavailable:
        return "torch"
    return "native"


def weights_kept(config: EngineConfig, *, gpu: bool, gguf: bool = False, torch_alone: bool | None = None) -> str:
    """How weights are kept: `engine.weights`, or expanded where torch alone computes on a GPU. Raises `ConfigError`.

    Those of a GGUF file are expanded too where torch alone computes on a CPU, whether by configuration or because the
    C++ kernels can't be compiled or loaded in this process: unpacked in torch's operations, a step would take many
    times as long as in bfloat16. `torch_alone` says so; None: it is found out, and the kernels are compiled where they
    haven't been on this machine.
    """
    if gpu:
        if config.attention != "torch" or config.weights == "dense":
            return config.weights
        if config.weights != "as_stored":
            raise ConfigError(
                f"engine.weights={config.weights} and engine.attention=torch are for CPUs together: set "
                "engine.weights=as_stored, or engine.attention=auto"
            )
        return "dense"
    if gguf and config.weights == "as_stored":
        alone = kernels_name(config, _CPU) == "torch" if torch_alone is None else torch_alone
        return "dense" if alone else "as_stored"
    return config.weights


def inputs_of(config: EngineConfig, quantization: Quantization, *, gpu: bool) -> Inputs:
    """How rows are multiplied with weights of whole numbers: `engine.activations`. Raises `ConfigError` on a GPU."""
    if config.activations == "int8":
        if gpu:
            raise ConfigError("engine.activations=int8 is for CPUs: set engine.activations=as_stored")
        return "int8"
    return "int8_by_row" if config.activations == "as_stored" and quantization.int8_inputs and not gpu else "float"


def check_inputs(config: EngineConfig, linears: Iterable[RowExactLinear], name: str) -> None:
    """Raise `ConfigError` where int8 was asked for and none of a model's products is computed so."""
    if config.activations == "int8" and not any(linear.int8 for linear in linears):
        raise ConfigError(
            f"engine.activations=int8 is about weights of whole numbers, and {name} has none as it is kept: set "
            "engine.weights=int8 or int4, or engine.activations=as_stored"
        )


@cache
def class_of(config: EngineConfig, dtype: torch.dtype, device: torch.device, gguf: bool = False) -> str:
    """The numerics class of an engine of this process that computes in `dtype`: of machine and libraries
    (`engine.runner.numerics_class`), of Triton where it computes, of this build's code, and of how weights
    are kept (`weights_kept`; `gguf`: the checkpoint is a GGUF file), since expanded ones are rounded, and multiplies
    them."""
    kept = weights_kept(config, gpu=device.type != "cpu", gguf=gguf)
    suffix = "" if kept == "as_stored" else f"/weights-{kept}"
    suffix += f"/transformers-{metadata.version('transformers')}" if config.models == "transformers" else ""
    suffix += "" if config.activations == "as_stored" else f"/activations-{config.activations}"
    return f"{_class_of_kernels(config, dtype, device)}/code-{code_digest()}{suffix}"


def _class_of_kernels(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> str:
    named = kernels_name(config, device)
    kernels = current_kernels.available(native_level(config)) if named == "native" else None
    if named == "triton" and device.type != "cuda":
        return f"interpreted/{numerics_class(None, config.numerics_class, dtype, device)}"
    of_libraries = numerics_class(kernels, config.numerics_class, dtype, device)
    return f"{of_libraries}/{_triton_class()}" if named == "triton" else of_libraries


def _triton_class() -> str:
    """What the bits of Triton's kernels follow from besides the GPU: its compiler lays out tiles, and ours are their
    sizes. Tuned options are no part of it: they change no order (`engine.tensors.launch_configs`)."""
    import triton

    from twinpool.engine.attention.triton_backend import attend_call

    return f"triton-{triton.__version__}/tiles-{attend_call.order_key(device_capability())}"


def hold_to_class(config: EngineConfig) -> None:
    """Restrict this process's libraries to the instructions of `config.numerics_class`. To be called before anything is
    computed. Raises `ConfigError` where the machine can't run that class, or the process has computed already."""
    processor.pin(config.numerics_class)
    processor.check_pinned(config.numerics_class, torch.backends.cpu.get_cpu_capability())


def wants_triton(config: EngineConfig, device: torch.device) -> bool:
    """Whether Triton's kernels compute here, by `config.attention` and the device."""
    return config.attention == "triton" or (config.attention == "auto" and device.type == "cuda")


def attention_for(
    config: EngineConfig, numerics: Numerics, device: torch.device, kernels: LayerKernels | None = None
) -> AttentionBackend:
    """Make the attention backend that `config.attention` names; raises `ConfigError` if it can't run on `device`.

    `kernels`: the result of `kernels_for_config`.
    """
    if isinstance(kernels, native_kernels.NativeKernels):
        return NativeAttention(numerics, kernels)
    if config.attention == "native":
        raise ConfigError("engine.attention=native is for CPUs; set engine.attention=triton or auto")
    if not wants_triton(config, device):
        return TorchAttention(numerics)
    _check_triton(device)
    from twinpool.engine.attention.triton_backend.triton_attention import TritonAttention

    return TritonAttention()


def refused_state(spec: PoolSetSpec, capability: int, *, triton: bool = True) -> str:
    """Why a GPU of this compute capability (times 10) can't keep such state, with Triton's kernels or with torch alone,
    in words; empty where it can."""
    refused = refused_kv(spec)
    if refused or not triton:
        return refused
    buffers = {b.name: b.dtype for pool in spec.pools for b in pool.buffers}
    for name, dtype in buffers.items():
        if dtype is torch.float8_e4m3fn and capability < _FLOAT8_CAPABILITY:
            return (
                f"buffer {name} is float8, which needs compute capability {_FLOAT8_CAPABILITY / 10}, and it has "
                f"{capability / 10}; use cache.index_dtype=auto"
            )
    return ""


def refused_kv(spec: PoolSetSpec) -> str:
    """Why neither a GPU nor Triton's kernels take the keys, values or latents of such state, in words; empty where they
    do."""
    names = quantised_buffers(spec)
    told = "computes on CPUs; use cache.kv_dtype=auto with GPUs and Triton's kernels"
    return f"cache.kv_dtype ({', '.join(names)}) {told}" if names else ""


def check_state(spec: PoolSetSpec, device: torch.device, *, triton: bool) -> None:
    """Raise `ConfigError` where `device` can't keep such state, with Triton's kernels or without."""
    refused = refused_kv(spec) if triton or device.type == "cuda" else ""
    if device.type == "cuda" and triton and not refused:
        major, minor = torch.cuda.get_device_capability(device)
        refused = refused_state(spec, 10 * major + minor)
    if refused:
        raise ConfigError(f"{device}: {refused}")


def _check_triton(device: torch.device) -> None:
    """Raise `ConfigError` unless Triton's kernels can run on `device`."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            "engine.attention=triton needs an NVIDIA GPU; set engine.attention=torch, or TRITON_INTERPRET=1 to run "
            "the kernels in Triton's interpreter"
        )
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"engine.attention=triton needs the triton package: {error}") from None
