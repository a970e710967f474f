"""A model that was mapped from an image: the same bits as one that was read, and nothing of its own."""

from __future__ import annotations

import gc
import mmap
import os
import random
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.harness import Bench, MakeCheckpoint
from tests.support.checkpoints import VOCAB
from tests.support.model_families import FAMILIES
from twinpool.cluster.serve.preflight import weight_bytes
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ConfigError
from twinpool.engine.runner import load_model, model_image
from twinpool.engine.runner.model_image import ImageUnfit, WritableImage, image_of, model_of
from twinpool.engine.tensors import row_exact_linear
from twinpool.engine.tensors.row_exact_linear import OneDnnWeight

PROMPT = 150
"""Tokens: more than a window and several chunks."""


class Images:
    """An `ModelImages` of this process, in memory."""

    def __init__(self, alone: str = "", full: bool = False) -> None:
        """`alone`: why there are none. `full`: whether none can be kept."""
        self.kept = dict[str, memoryview]()
        self.given_up = dict[str, str]()
        self.found, self.used = 0, ""
        self._alone, self._full = alone, full

    def find(self, key: str) -> memoryview | None:
        if self._alone:
            raise ImageUnfit(self._alone)
        self.found += key in self.kept
        return self.kept.get(key)

    def keep(self, key: str, image: WritableImage) -> memoryview:
        fd = os.memfd_create("image")
        image.write(fd)
        if self._full:
            os.close(fd)
            raise ImageUnfit("no room")
        self.kept[key] = memoryview(mmap.mmap(fd, image.nbytes, prot=mmap.PROT_READ))
        os.close(fd)
        return self.kept[key]

    def give_up(self, key: str, reason: str) -> None:
        self.given_up[key] = reason

    def use_only(self, key: str) -> None:
        self.used = key


def prompt(seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(PROMPT)]


def packed_weights(model: object) -> list[OneDnnWeight]:
    """All of a model that oneDNN has packed."""
    seen, found = dict[int, object](), list[OneDnnWeight]()
    left = [model]
    while left:
        part = left.pop()
        if id(part) in seen or isinstance(part, (type, ModuleType, FunctionType, Tensor)):
            continue
        seen[id(part)] = part
        if isinstance(part, OneDnnWeight):
            found.append(part)
        left.extend(gc.get_referents(part))
    return found


def never(*_: object, **__: object) -> None:
    pytest.fail("a checkpoint was read")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mapped_model_computes_the_bits_of_one_that_was_read(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = FAMILIES[family](tmp_path / "model")
    alone = Bench(folder, share_weights="off")
    monkeypatch.setattr(model_image, "_WRITE_BYTES", 1000)  # So that large tensors are written in pieces.
    images = Images()
    writer = Bench(folder, images=images)
    monkeypatch.setattr(load_model, "Weights", never)
    reader = Bench(folder, images=images)
    assert (len(images.kept), images.found) == (1, 1)
    expected = alone.forced(prompt(), (64, 64, 22))
    for bench in (writer, reader):
        assert torch.equal(bench.forced(prompt(), (64, 64, 22)), expected)
        assert bench.generate(prompt(1), 12, chunk=40) == alone.generate(prompt(1), 12, chunk=40)


def test_an_image_has_each_weight_once_and_a_mapped_model_has_none_of_its_own(checkpoint: MakeCheckpoint) -> None:
    images = Images()
    bench = Bench(checkpoint("llama", tied=True), images=images)
    (image,) = images.kept.values()
    begin = torch.frombuffer(image, dtype=torch.uint8).data_ptr()
    mapped = bench.engine.decoder.embed_vh
    assert isinstance(mapped, torch.Tensor)
    assert begin <= mapped.data_ptr() < begin + len(image)
    read = Bench(checkpoint("llama", tied=True), share_weights="off").engine.decoder
    weights = read.embed_vh.nbytes + sum(p.stat().st_size for p in checkpoint("llama", tied=True).glob("*.safetensors"))
    planned = weight_bytes(read_model_spec(checkpoint("llama", tied=True)), config_from_dict({}))
    assert planned == pytest.approx(weights, rel=0.01), "memory is planned for both"
    assert weights < len(image) < 1.25 * weights  # The head is the embedding, packed. Panels are padded.


def test_the_writer_frees_what_it_has_written(checkpoint: MakeCheckpoint) -> None:
    decoder = Bench(checkpoint("qwen3"), share_weights="off").engine.decoder
    numerics = Bench(checkpoint("qwen3"), share_weights="off").engine.numerics
    assert isinstance(decoder.embed_vh, torch.Tensor)
    storage = decoder.embed_vh.untyped_storage()
    Images().keep("key", image_of(decoder, numerics))
    assert storage.nbytes() == 0


@pytest.mark.skipif(not OneDnnWeight.packed(torch.zeros(16, 16)), reason="oneDNN packs nothing here")
def test_the_writer_gives_up_what_onednn_has_packed(checkpoint: MakeCheckpoint) -> None:
    """Its bytes are in the image by then: they would be there twice."""
    engine = Bench(checkpoint("qwen3"), share_weights="off", attention="torch").engine
    packed = packed_weights(engine.decoder)
    assert packed
    Images().keep("key", image_of(engine.decoder, engine.numerics))
    for weight in packed:
        with pytest.raises(AssertionError, match="released"):
            weight(torch.zeros(1, weight.shape[1]), None)


def test_other_settings_and_other_weights_are_other_images(checkpoint: MakeCheckpoint) -> None:
    images = Images()
    Bench(checkpoint("llama"), images=images)
    Bench(checkpoint("llama"), images=images, dtype="bfloat16")
    Bench(checkpoint("llama", seed=1), images=images)
    assert (len(images.kept), images.found) == (3, 0)


@pytest.mark.parametrize("full", [False, True])
def test_where_there_is_none_a_model_of_its_own_is_loaded_unless_that_must_not_be(
    full: bool, checkpoint: MakeCheckpoint
) -> None:
    def images() -> Images:
        return Images(alone="" if full else "no agent", full=full)

    expected = Bench(checkpoint("llama")).generate(prompt(), 8)
    assert Bench(checkpoint("llama"), images=images()).generate(prompt(), 8) == expected
    with pytest.raises(ConfigError, match=r"share_weights=on.*(no agent|no room)"):
        Bench(checkpoint("llama"), images=images(), share_weights="on")


def onednn_packs(dtype: str) -> bool:
    """Whether oneDNN itself packs and multiplies weights of `dtype` at this processor's level."""
    weight_nk = torch.zeros(16, 16, dtype=getattr(torch, dtype))
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight_nk)
        torch.ops.mkldnn._linear_pointwise(weight_nk, packed, None, "none", [], "")
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("dtype", [dtype for dtype in ("float32", "bfloat16") if onednn_packs(dtype)])
def test_weights_that_onednn_has_packed_are_mapped_and_give_the_same_bits(
    dtype: str, checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every processor with `attention=torch`; by default on those for which no kernel of ours has bfloat16."""
    alone = Bench(checkpoint("qwen3"), share_weights="off", attention="torch", dtype=dtype)
    images = Images()
    writer = Bench(checkpoint("qwen3"), images=images, attention="torch", dtype=dtype)
    monkeypatch.setattr(load_model, "Weights", never)
    reader = Bench(checkpoint("qwen3"), images=images, attention="torch", dtype=dtype)
    assert (len(images.kept), images.found, images.given_up) == (1, 1, {})
    (image,) = images.kept.values()
    begin = torch.frombuffer(image, dtype=torch.uint8).data_ptr()
    for bench in (writer, reader):
        packed = packed_weights(bench.engine.decoder)
        assert len(packed) == len(packed_weights(alone.engine.decoder)) > 4
        assert all(begin <= weight.data_ptr() < begin + len(image) for weight in packed)
    expected = alone.forced(prompt(), (64, 64, 22))
    for bench in (writer, reader):
        assert torch.equal(bench.forced(prompt(), (64, 64, 22)), expected)


def test_where_torch_can_not_place_packed_weights_they_are_a_workers_own(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = Images()
    shared = Bench(checkpoint("llama"), images=images, attention="torch").generate(prompt(), 8)
    with monkeypatch.context() as patch:
        patch.setattr(row_exact_linear, "_libtorch", lambda: None)  # A torch without that interface.
        assert Bench(checkpoint("llama"), images=images, attention="torch").generate(prompt(), 8) == shared
        with pytest.raises(ConfigError, match=r"share_weights=on.*can't use its node's image.*oneDNN"):
            Bench(checkpoint("llama"), images=images, attention="torch", share_weights="on")


def test_a_layout_without_strides_is_no_image_and_others_are_told(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def undescribed(weight: OneDnnWeight) -> bytes:
        raise row_exact_linear.LayoutUnavailable("no description")

    monkeypatch.setattr(OneDnnWeight, "layout", property(undescribed))
    images = Images()
    bench = Bench(checkpoint("llama"), images=images, attention="torch")
    assert bench.generate(prompt(), 8) == Bench(checkpoint("llama"), attention="torch").generate(prompt(), 8)
    assert not images.kept
    (reason,) = images.given_up.values()
    assert "no description" in reason


@pytest.mark.parametrize("damage", [b"", b"twinimg1", b"x" * 64])
def test_bytes_that_are_no_image_are_refused(damage: bytes) -> None:
    with pytest.raises(ImageUnfit, match="no image of a model"):
        model_of(memoryview(damage), None)


def test_a_part_of_an_image_is_refused(checkpoint: MakeCheckpoint) -> None:
    images = Images()
    Bench(checkpoint("llama"), images=images)
    (image,) = images.kept.values()
    with pytest.raises(ImageUnfit, match="part of one"):
        model_of(image[:-64], None)


def test_views_of_one_memory_are_views_of_one_memory_in_the_image() -> None:
    """Of any part of it, in any order, of any shape; what none of them shows isn't written."""
    rng = random.Random(2)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        whole = torch.arange(4096).to(dtype)
        cuts = [(begin, begin + rng.randrange(1, 300)) for begin in rng.sample(range(1000, 3000), 9)]
        views = [whole[begin:end] for begin, end in cuts]
        views += [whole[1500:2100].view(20, 30).T, whole[2000:2600:3], whole[1700:1701], whole[:0]]
        model: Any = SimpleNamespace(kernels=None, views=views)
        expected = [view.clone() for view in views]
        low, high = min(begin for begin, _ in cuts), max(2600, *(end for _, end in cuts))
        images = Images()
        image = images.keep("key", image_of(model, model))
        assert len(image) < (high - low) * dtype.itemsize + 8192
        try:
            both: Any = model_of(image, None)
        except RuntimeError as error:
            pytest.fail(f"a view reaches beyond what was written: {error}")
        mapped, again = both
        assert mapped is again
        for got, want in zip(mapped.views, expected, strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got, want)
        first, second = mapped.views[0], mapped.views[1]
        apart = (cuts[1][0] - cuts[0][0]) * dtype.itemsize
        assert second.data_ptr() - first.data_ptr() == apart
