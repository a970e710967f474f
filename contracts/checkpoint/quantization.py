"""How a checkpoint's weights are quantised: `quantization_config` of `config.json`, checked.

Most of a layout can be seen in the tensors (`engine.weight_formats.block_formats`); here is what can't, and which
methods and variants are refused, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from twinpool.contracts.checkpoint.json_fields import JsonFields

METHODS = ("mxfp4", "fp8", "fbgemm_fp8", "compressed-tensors", "modelopt", "awq", "gptq")
"""The values of ``quant_method`` whose checkpoints are served."""
_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "dense",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
)
_WIDTHS = (4, 8)


@dataclass(frozen=True, slots=True)
class Quantization:
    """What `config.json` says of quantised weights."""

    method: str = ""
    """Empty: none is said; tensors may be quantised nonetheless."""
    bits: int = 0
    """GPTQ: of a number."""
    groups: tuple[int, ...] = ()
    """Columns that share a scale, of each kind of layer that there is; 0: all of a row."""
    added_zero: int = 0
    """GPTQ: what is added to a stored zero point (1 in the first version of the format, 0 in the second)."""
    block: tuple[int, int] | None = None
    """fp8: rows and columns that share a scale, where scales are by block."""
    int8_inputs: bool = False
    """Whether the checkpoint declares that what its weights are multiplied with is quantised to int8."""
    note: str = ""
    """What the checkpoint declares and isn't done, for the operator."""


def read_quantization(config: JsonFields) -> Quantization:
    """Read and check `quantization_config`. Raises `CheckpointError` for a method or a variant that isn't known."""
    if "quantization_config" not in config and "compression_config" not in config:
        return Quantization()
    given = config.table("quantization_config") or config.table("compression_config")
    fields = JsonFields(config.path, given)
    method = str(given.get("quant_method") or ("compressed-tensors" if "config_groups" in given else ""))
    if method not in METHODS:
        found = f"by {method!r}" if method else "without a quant_method"
        raise config.refuse(f"checkpoints quantised {found} are not supported; supported are {', '.join(METHODS)}")
    return _READERS.get(method, _plain)(fields, method)


def _plain(fields: JsonFields, method: str) -> Quantization:
    return Quantization(method)


def _fp8(fields: JsonFields, method: str) -> Quantization:
    fields.text("fmt", "e4m3", ("e4m3", "float8_e4m3fn"))
    block = _block(fields.values.get("weight_block_size"), fields)
    return Quantization(method, block=block, note=_note(fields, activations=True))


def _awq(fields: JsonFields, method: str) -> Quantization:
    fields.text("version", "gemm", ("gemm", "GEMM"))
    return Quantization(method, _width(fields, (4,)), (_group(fields, fields.values.get("group_size", 128)),))


def _gptq(fields: JsonFields, method: str) -> Quantization:
    form = fields.text("checkpoint_format", "gptq", ("gptq", "gptq_v2"))
    group = _group(fields, fields.values.get("group_size", 128))
    return Quantization(method, _width(fields, _WIDTHS), (group,), added_zero=int(form == "gptq"))


def _compressed(fields: JsonFields, method: str) -> Quantization:
    form = fields.text("format", "dense")
    groups = fields.table("config_groups")
    forms = {form} if form != "mixed-precision" else set()
    blocks, sizes, inputs = set(), set(), set()
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise fields.refuse(f"quantization_config.config_groups.{name} must be an object, got {group!r}")
        forms.add(str(group.get("format") or form))
        weights = group.get("weights")
        if isinstance(weights, Mapping):
            if weights.get("group_size") is not None:
                sizes.add(_group(fields, weights.get("group_size")))
            if weights.get("block_structure") is not None:
                blocks.add(_block(weights.get("block_structure"), fields))
            if weights.get("type", "int") == "int" and weights.get("num_bits", 8) not in _WIDTHS:
                raise fields.refuse(
                    f"quantization_config.config_groups.{name}: weights of {weights.get('num_bits')} bits are not "
                    "supported; supported are 4 and 8"
                )
        inputs.add(_declared_inputs(group))
    for unknown in sorted(forms - {*_FORMATS, "mixed-precision"}):
        raise fields.refuse(
            f"compressed-tensors of the format {unknown!r} are not supported; supported are {', '.join(_FORMATS)}"
        )
    if fields.table("sparsity_config").get("format", "dense") not in {"dense", None}:
        raise fields.refuse("sparse compressed-tensors are not supported; convert the weights to dense ones")
    if fields.table("transform_config").get("config_groups"):
        raise fields.refuse("compressed-tensors with transforms (rotations of activations) are not supported")
    if len(blocks) > 1:
        raise fields.refuse("blocks of several sizes in one checkpoint are not supported")
    note = _note(fields, activations=not inputs <= {"", "int8"} or len(inputs) > 1)
    int8 = inputs == {"int8"}
    return Quantization(method, 0, tuple(sorted(sizes)), block=next(iter(blocks), None), int8_inputs=int8, note=note)


def _declared_inputs(group: Mapping[str, object]) -> str:
    """What a group of compressed-tensors declares of its layers' inputs: nothing, "int8", or something else."""
    inputs, weights = group.get("input_activations"), group.get("weights")
    if not isinstance(inputs, Mapping):
        return ""
    whole = isinstance(weights, Mapping) and weights.get("type", "int") == "int"
    return "int8" if whole and (inputs.get("type", "int"), inputs.get("num_bits", 8)) == ("int", 8) else "other"


def _modelopt(fields: JsonFields, method: str) -> Quantization:
    fields.text("quant_algo", "FP8", ("FP8", "NVFP4", "FP8_PER_CHANNEL_PER_TOKEN"))
    return Quantization(method, note=_note(fields, activations=True))


_READERS = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
}
_ACTIVATIONS = "quantised activations are declared; here they stay as computed, and weights alone are quantised"
_KV_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quant_method")
"""Keys that declare a KV cache with scales of the checkpoint (`k_scale`): of compressed-tensors and ModelOpt."""


def _note(fields: JsonFields, *, activations: bool) -> str:
    notes = [_ACTIVATIONS] if activations else []
    notes += [
        f"{key} declares a KV cache with scales of the checkpoint, which aren't used: keys and values are as "
        "cache.kv_dtype says"
        for key in _KV_KEYS
        if fields.values.get(key)
    ]
    return "; ".join(notes)


def _block(value: object, fields: JsonFields) -> tuple[int, int] | None:
    if value is None:
        return None
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes):
        raise fields.refuse(f"a block of quantised weights must be two whole numbers, rows and columns, got {value!r}")
    return sizes[0], sizes[1]


def _group(fields: JsonFields, size: object) -> int:
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise fields.refuse(f"quantization_config: group_size must be a whole number of 1 or more, or -1, got {size!r}")
    return max(size, 0)


def _width(fields: JsonFields, widths: tuple[int, ...]) -> int:
    bits = fields.values.get("bits", fields.values.get("w_bit"))
    if bits not in widths:
        raise fields.refuse(
            f"quantization_config.bits is {bits!r}; supported are {' and '.join(str(width) for width in widths)}"
        )
    assert isinstance(bits, int)
    return bits
