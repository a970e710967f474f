"""Weights stored as four-bit floats with a scale a group (MXFP4), as gpt-oss is published.

The format is MXFP4 of the Open Compute Project's "Microscaling Formats (MX) Specification", version 1.0: 32 elements
of one sign, two exponent and one mantissa bit share a scale that is a power of two, stored as its exponent plus 127.
Two elements lie in a byte, the first in the low half. Unpacking is exact, in bfloat16 as in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
"""Elements that share a scale."""
_BIAS = 127
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Unpack blocks [..., groups, 16] with scales [..., groups], both uint8, to [..., groups * 32] float32."""
    values = torch.tensor((*_VALUES, *(-value for value in _VALUES)), device=blocks.device)
    pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    exponents = scales.to(torch.int32).sub_(_BIAS).unsqueeze(-1)
    return torch.ldexp(values[pairs.long()], exponents).flatten(-2)
