"""The short causal convolution in front of a recurrence: each channel by itself, over the last few positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cache.memory.kv_cache_spec import BufferSpec, IndexSpace
from engine.layers.forward_context import ForwardContext, LayerPlace
from engine.layers.norm import silu
from engine.tensors.shard import Shard, ShardAxis
from engine.tensors.weight_loader import Weights


def conv_buffer(
    name: str, layers: int, units: int, width: int, taps: int, dtype: torch.dtype, shard: Shard
) -> BufferSpec:
    """The last `taps` inputs of `units` heads or groups with `width` channels each: [units, taps, width] a slot.

    Channels that are divided among ranks in different ways need a buffer each.
    """
    here = shard.heads(units, "heads of a convolution")
    shape = (len(here), taps, width)
    return BufferSpec(name, layers, shape, dtype, IndexSpace.SLOT, heads=units, first_head=here.start)


class CausalConv:
    """silu(convolution), with the channels of one rank. Its inputs before a step are in buffers of the state pool."""

    def __init__(
        self,
        weights: Weights,
        place: LayerPlace,
        buffers: Sequence[str],
        parts: Sequence[ShardAxis],
        kernel: int,
        *,
        bias: bool,
    ) -> None:
        """`parts` are the channels of each of `buffers`: ranges of the whole axis, `ShardAxis.whole`."""
        whole = parts[0].whole
        self._place, self._buffers = place, tuple(buffers)
        self._weight_kc = torch.cat([weights.tensor("weight", part, 1, kernel) for part in parts])[:, 0].float().t()
        self._weight_kc = self._weight_kc.contiguous()
        self._bias_c = torch.cat([weights.tensor("bias", part) for part in parts]).float() if bias else None
        assert all(part.whole == whole for part in parts), "the channels are parts of one axis"

    def __call__(self, x_tc: Tensor, ctx: ForwardContext) -> Tensor:
        """Of tokens, [T, channels] in the model's dtype; the slots get the last inputs."""
        buffers = ctx.buffers(self._place)
        states = [buffers[name] for name in self._buffers]
        out_tc = ctx.attention.recurrence.conv(x_tc, states, self._weight_kc, self._bias_c, ctx.slots[self._place.pool])
        return silu(out_tc.float()).to(x_tc.dtype)
