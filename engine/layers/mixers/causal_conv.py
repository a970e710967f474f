"""The short causal convolution in front of a recurrence: depthwise (each channel by itself), over a few positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twinpool.cache.memory.kv_cache_spec import BufferSpec, IndexSpace
from twinpool.engine.layers.forward_context import ForwardContext, LayerPlace
from twinpool.engine.layers.norm import silu
from twinpool.engine.tensors.shard import Shard, ShardAxis
from twinpool.engine.tensors.weight_loader import Weights


def conv_buffer(
    name: str, layers: int, units: int, width: int, taps: int, dtype: torch.dtype, shard: Shard
) -> BufferSpec:
    """Declare a buffer of the last `taps` inputs of `units` heads or groups of `width` channels: [units, taps, width] a
    slot.

    Parts of the channels that ranks divide in different ways need a buffer each.
    """
    here = shard.heads(units, "heads of a convolution")
    shape = (len(here), taps, width)
    return BufferSpec(name, layers, shape, dtype, IndexSpace.SLOT, heads=units, first_head=here.start)


class CausalConv:
    """silu(convolution) of one rank's channels. The inputs before a step are read from buffers of the state pool."""

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
        """`parts` are the channels of each of `buffers`, as ranges of one axis of all channels."""
        whole = parts[0].whole
        self._place, self._buffers = place, tuple(buffers)
        self._weight_kc = torch.cat([weights.tensor("weight", part, 1, kernel) for part in parts])[:, 0].float().t()
        self._weight_kc = self._weight_kc.contiguous()
        self._bias_c = torch.cat([weights.tensor("bias", part) for part in parts]).float() if bias else None
        assert all(part.whole == whole for part in parts), "the channels are parts of one axis"

    def __call__(self, x_tc: Tensor, ctx: ForwardContext) -> Tensor:
        """Convolve [T, channels] in the model's dtype, without padding; writes the last inputs into the slots."""
        buffers = ctx.buffers(self._place)
        states = [buffers[name] for name in self._buffers]
        out_tc = ctx.attention.recurrence.conv(x_tc, states, self._weight_kc, self._bias_c, ctx.slots[self._place.pool])
        return silu(out_tc.float()).to(x_tc.dtype)
