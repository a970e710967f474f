"""A weight that oneDNN has packed: multiplied, placed over memory of others, and given back."""

from __future__ import annotations

import ctypes
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from twinpool.engine.tensors import row_exact_linear
from twinpool.engine.tensors.row_exact_linear import LayoutUnavailable, OneDnnWeight

N, K, ROWS = 24, 40, 5


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def packed() -> OneDnnWeight:
    weight = OneDnnWeight.packed(numbers(N, K))
    assert weight is not None
    return weight


def bytes_of(weight: OneDnnWeight) -> Tensor:
    """A copy of its packed bytes."""
    return torch.frombuffer(bytearray(ctypes.string_at(weight.data_ptr(), weight.nbytes())), dtype=torch.uint8)


def placed(memory: Tensor) -> OneDnnWeight:
    return OneDnnWeight.placed(memory, (N, K), torch.float32, packed().layout)


def test_it_multiplies_as_the_weight_does_with_a_bias_and_without_one() -> None:
    x, bias = numbers(ROWS, K), numbers(N)
    for weight in (packed(), placed(bytes_of(packed()))):
        assert (weight.shape, weight.dtype) == ((N, K), torch.float32)
        torch.testing.assert_close(weight(x, None), F.linear(x, numbers(N, K)))
        torch.testing.assert_close(weight(x, bias), F.linear(x, numbers(N, K), bias))
        assert torch.equal(weight(x, bias), packed()(x, bias))


def test_memory_of_others_stays_mapped_as_long_as_a_weight_lies_there_and_no_longer() -> None:
    memory = bytes_of(packed())
    weight, mapped = placed(memory), weakref.ref(memory)
    assert weight.data_ptr() == memory.data_ptr(), "nothing is copied"
    del memory
    gc.collect()
    assert mapped() is not None
    weight.release()
    gc.collect()
    assert mapped() is None
    with pytest.raises(AssertionError, match="released"):
        weight(numbers(ROWS, K), None)


def test_what_can_be_packed_and_not_multiplied_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As bfloat16 on processors that lack its instructions."""

    def refuses(*_: object) -> Tensor:
        raise RuntimeError("mkldnn_bf16: no such instructions")

    assert OneDnnWeight.packed(torch.zeros(N, K, device="meta")) is None
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", refuses)
    assert OneDnnWeight.packed(numbers(N, K)) is None


@pytest.mark.parametrize(("failed", "handle"), [(1, 7), (0, 0)])
def test_what_torch_does_not_place_is_no_weight(failed: int, handle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, or gives nothing."""

    def create(*given: Any) -> int:
        given[8]._obj.value = handle
        return failed

    stand_in = SimpleNamespace(
        aoti_torch_dtype_float32=lambda: 6,
        aoti_torch_device_type_cpu=lambda: 0,
        aoti_torch_layout__mkldnn=lambda: 3,
        aoti_torch_create_tensor_from_blob_v2=create,
    )
    stolen: list[object] = []
    layout = packed().layout
    monkeypatch.setattr(row_exact_linear, "_libtorch", lambda: stand_in)

    def steal(capsule: object) -> Tensor:
        stolen.append(capsule)
        return numbers(N, K)

    stealing = SimpleNamespace(alloc_tensor_by_stealing_from_void_ptr=steal)
    monkeypatch.setattr(row_exact_linear, "_aoti", lambda: stealing)
    with pytest.raises(LayoutUnavailable, match="refused"):
        OneDnnWeight.placed(torch.zeros(64, dtype=torch.uint8), (N, K), torch.float32, layout)
    assert stolen == []


@pytest.mark.parametrize("error", [AttributeError("no such symbol"), OSError("no such library")])
def test_another_build_of_torch_says_that_it_places_nothing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = packed().layout

    def missing() -> None:
        raise error

    monkeypatch.setattr(row_exact_linear, "_libtorch", missing)
    with pytest.raises((LayoutUnavailable, OSError)) as caught:
        OneDnnWeight.placed(torch.zeros(64, dtype=torch.uint8), (N, K), torch.float32, layout)
    assert isinstance(caught.value, LayoutUnavailable)


@pytest.mark.parametrize("error", [AttributeError("no such operator"), RuntimeError("opaque")])
def test_a_layout_that_torch_does_not_describe_is_said_to_be_unavailable(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = packed()

    def undescribed(_: Tensor) -> Tensor:
        raise error

    monkeypatch.setattr(torch.ops.mkldnn, "_get_mkldnn_serialized_md", undescribed)
    with pytest.raises((LayoutUnavailable, RuntimeError)) as caught:
        _ = weight.layout
    assert isinstance(caught.value, LayoutUnavailable)
