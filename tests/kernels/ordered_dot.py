"""What `tl.dot` computes in Triton's interpreter, for the claims of this folder and for rehearsals of the GPU bench.

The interpreter hands `tl.dot` to numpy's matmul, and numpy to a BLAS, which picks a kernel by the shape of the whole
product: with its AVX2 kernels a row of 16 is not the bits of the same row of 64. A GPU's matrix instructions know no
such choice. Each element of their result is a chain of additions over the inner axis that begins at the accumulator,
and neither the number of rows nor that of columns takes part in it. Claims about bits hold on a GPU because of that,
so they are tested with a product that has it: one addition after the other, in the order of the inner axis.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def ordered_dot(a_mk: NDArray[Any], b_kn: NDArray[Any], d_mn: NDArray[Any]) -> NDArray[Any]:
    """``d + a @ b``, each element ``(((d + a[0] b[0]) + a[1] b[1]) + ...)``, every step rounded to the dtype of `d`.

    Leading axes are those of a batch. The operations are by element, so that no shape changes their order.
    """
    out = np.array(d_mn)
    factors_km = np.moveaxis(a_mk.astype(out.dtype), -1, 0)[..., None]
    rows_kn = np.moveaxis(b_kn.astype(out.dtype), -2, 0)[..., None, :]
    product = np.empty_like(out)
    for factor, row in zip(factors_km, rows_kn, strict=True):
        np.multiply(factor, row, out=product)
        np.add(out, product, out=out)
    return out


def use_ordered_dot() -> None:
    """Make it the `tl.dot` of this process's interpreter."""
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        for side in (a, b):
            # The interpreter keeps other formats as integers, and would multiply those.
            assert side.data.dtype.kind == "f", f"raise {side.dtype} to float32 before a dot in the interpreter"
        return interpreter.TensorHandle(ordered_dot(a.data, b.data, d.data), d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
