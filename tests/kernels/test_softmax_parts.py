"""Scratch for parts of a softmax: waves cover all tokens once, within the bound."""

from __future__ import annotations

import weakref
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from tests.support.launches import production_launches
from tests.support.launches.recorded_launches import recording
from twinpool.engine.attention.triton_backend.attend_call import Parts, waves
from twinpool.engine.attention.triton_backend.triton_attention import TritonAttention


@pytest.mark.parametrize("tokens", [1, 7, 64, 1000])
def test_waves_cover_every_token_once_and_their_parts_fit(tokens: int) -> None:
    for a_token, scratch_bytes, quantum in product((0, 40, 4096), (100, 5000, 1 << 20), (1, 16)):
        found = list(waves(tokens, a_token, scratch_bytes, quantum))
        assert found[0][0] == 0
        assert sum(found[-1]) == tokens
        assert all(first + count == following for (first, count), (following, _) in pairwise(found))
        for _, count in found:
            parts = Parts(count * a_token // 40, 8)
            held = sum(tensor.untyped_storage().nbytes() for tensor in parts.tensors(torch.device("cpu"))[:1])
            assert held <= scratch_bytes or count == 1 or a_token == 0


def test_waves_end_where_tiles_end_if_a_tile_fits() -> None:
    assert list(waves(40, 100, 1800, 16)) == [(0, 16), (16, 16), (32, 8)]
    assert list(waves(5, 100, 300, 16)) == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)]


def test_no_tokens_are_no_waves_and_parts_that_fit_are_one() -> None:
    assert list(waves(0, 100, 1000, 16)) == []
    assert list(waves(40, 0, 0, 16)) == [(0, 40)]


def test_the_tensors_of_parts_are_apart_and_begin_where_vectors_do() -> None:
    m, total, acc = Parts(5, 12).tensors(torch.device("cpu"))
    assert (len(m), len(total), len(acc)) == (5, 5, 60)
    begins = [tensor.storage_offset() for tensor in (m, total, acc)]
    assert all(begin % 16 == 0 for begin in begins)
    assert begins[0] + 5 <= begins[1] <= begins[1] + 5 <= begins[2]
    assert Parts(5, 12).nbytes == 5 * 14 * 4
    assert not Parts(5, 12).fit(5 * 14 * 4)
    assert Parts(5, 12).fit(5 * 14 * 4 + 128)


def test_parts_of_a_wave_are_given_back_before_those_of_the_next_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[weakref.ref[Tensor]] = []
    real = Parts.tensors

    def tensors(self: Parts, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        assert all(wave() is None for wave in taken)
        found = real(self, device)
        taken.append(weakref.ref(found[0]))
        return found

    monkeypatch.setattr(Parts, "tensors", tensors)
    rig = production_launches.Rig(TritonAttention(capability=90, scratch_bytes=1 << 20))
    with recording() as launches:
        production_launches._attend(rig, production_launches.HEADS[0], 1, 64, 32768)
        assert len(taken) == 10, "a megabyte has room for seven queries of 32 heads and 8 segments"
        production_launches._attend_latent(rig, production_launches.LATENTS[0], 1, 8, 32768)
    assert len(taken) > 11
    assert {launch.name for launch in launches} == {"extend_kernel", "latent_split_kernel", "merge_segments_kernel"}
    assert max(launch.scratch_bytes for launch in launches if launch.name == "extend_kernel") <= 1 << 20
