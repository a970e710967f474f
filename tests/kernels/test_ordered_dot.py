"""The interpreter's `tl.dot`: one order of additions an element, whatever the shape and whatever BLAS numpy has."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.ordered_dot import ordered_dot


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (16, 16, 7), (5, 3, 64)])
def test_each_element_is_a_chain_of_additions_in_the_order_of_the_inner_axis(m: int, n: int, k: int) -> None:
    a, b, d = draw(1, m, k), draw(2, k, n), draw(3, m, n)
    got = ordered_dot(a, b, d)
    for row in range(m):
        for column in range(n):
            chain = d[row, column]
            for inner in range(k):
                chain = np.float32(chain + np.float32(a[row, inner] * b[inner, column]))
            assert got[row, column] == chain


def test_rows_and_columns_have_the_same_bits_in_every_shape() -> None:
    a, b, d = draw(1, 64, 320), draw(2, 320, 64), draw(3, 64, 64)
    whole = ordered_dot(a, b, d)
    for rows in (1, 2, 3, 16, 17, 32):
        for columns in (1, 16, 31):
            part = ordered_dot(a[-rows:], np.asfortranarray(b[:, :columns]), d[-rows:, :columns])
            assert np.array_equal(part, whole[-rows:, :columns]), (rows, columns)


def test_zeros_that_pad_the_inner_axis_change_no_bit_and_batches_are_products_side_by_side() -> None:
    a, b, d = draw(1, 3, 16, 24), draw(2, 3, 24, 8), draw(3, 3, 16, 8)
    padded = ordered_dot(np.pad(a, ((0, 0), (0, 0), (0, 8))), np.pad(b, ((0, 0), (0, 8), (0, 0))), d)
    for got, *parts in zip(padded, a, b, d, strict=True):
        assert np.array_equal(got, ordered_dot(*parts))


def test_halves_are_added_up_in_the_accumulators_precision() -> None:
    a, b = draw(1, 16, 64).astype(np.float16), draw(2, 64, 16).astype(np.float16)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(ordered_dot(a, b, np.zeros((16, 16), np.float32)), exact, rtol=0, atol=1e-4)
