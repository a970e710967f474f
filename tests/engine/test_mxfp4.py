"""Four-bit weights, against transformers' own reading of them."""

from __future__ import annotations

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from twinpool.engine.weight_formats.block_weight import BlockWeight, Code


def test_every_element_and_scale_is_what_transformers_reads() -> None:
    source = torch.Generator().manual_seed(1)
    blocks = torch.randint(256, (3, 40, 2, 16), generator=source, dtype=torch.uint8)
    blocks[0, :16, 0] = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales = torch.randint(100, 150, (3, 40, 2), generator=source, dtype=torch.uint8)
    want = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    for expert in range(3):
        weight = BlockWeight(Code.E2M1, blocks[expert].flatten(1), scales[expert], 32, torch.bfloat16)
        assert torch.equal(weight.unpack(), want[expert].float())
        assert torch.equal(weight.dense(), want[expert]), "exact in bfloat16 as well"
