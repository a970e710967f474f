"""Four-bit weights, against transformers' own reading of them."""

from __future__ import annotations

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from twinpool.engine.tensors.weight_loader import unpack_mxfp4


def test_every_element_and_scale_is_what_transformers_reads() -> None:
    source = torch.Generator().manual_seed(1)
    blocks = torch.randint(256, (3, 40, 2, 16), generator=source, dtype=torch.uint8)
    blocks[0, :16, 0] = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales = torch.randint(100, 150, (3, 40, 2), generator=source, dtype=torch.uint8)
    want = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    assert torch.equal(unpack_mxfp4(blocks, scales), want.float())
    assert torch.equal(unpack_mxfp4(blocks, scales).bfloat16(), want), "exact in bfloat16 as well"
