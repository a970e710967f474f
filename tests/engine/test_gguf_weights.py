"""GGUF models whose weights are kept as the file has them: the bits of the expanded model, and the memory of the file.

Types that no package quantises to are random blocks; what they mean is in `test_gguf_blocks`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.harness import Bench
from tests.engine.test_model_image import Images
from tests.support.checkpoints import make_checkpoint
from tests.support.family_scenes import tokens_of
from tests.support.gguf_files import write_gguf
from twinpool.cluster.serve.preflight import weight_bytes
from twinpool.cluster.serve.terminal import weights_line
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.engine.models.registry import model_for
from twinpool.engine.native import current_kernels
from twinpool.engine.native.compile_kernels import NativeUnavailable
from twinpool.engine.native.current_kernels import in_use
from twinpool.engine.native.native_kernels import PackedBlocks
from twinpool.engine.runner.kernel_choice import class_of, weights_kept
from twinpool.engine.tensors.row_exact_linear import RowExactLinear
from twinpool.engine.tensors.shard import Shard
from twinpool.engine.tensors.weight_loader import Weights
from twinpool.engine.weight_formats.block_weight import BlockStack

CPU = torch.device("cpu")
CHUNKS = (40, 7, 1, 1)


def k_medium(name: str) -> str:
    """The types of llama.cpp's mixture Q4_K_M: the embedding, values and each second layer's last product in Q6_K."""
    return "Q6_K" if name.startswith("token_embd") or "attn_v" in name or "blk.1.ffn_down" in name else "Q4_K"


KINDS: dict[str, Any] = {"K_M": k_medium, **{kind: kind for kind in ("Q8_0", "Q4_1", "Q5_0", "Q2_K", "Q3_K", "IQ4_XS")}}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    base = tmp_path_factory.mktemp("gguf")
    folders = cache(lambda tied: make_checkpoint(base / f"tied-{tied}", hidden=256, head_dim=64, tied=tied))

    @cache
    def make(kind: str, *, tied: bool = False) -> Path:
        return write_gguf(folders(tied), base / f"{kind}-{tied}.gguf", "llama", KINDS.get(kind, kind))

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_kept_as_stored_has_the_bits_of_the_expanded_one(files: Any, kind: str) -> None:
    file = files(kind, tied=kind in ("K_M", "Q4_1"))
    prompt = tokens_of(1, sum(CHUNKS))
    stored = Bench(file, dtype="float32").forced(prompt, CHUNKS)
    expanded = Bench(file, dtype="float32", weights="dense").forced(prompt, CHUNKS)
    assert torch.equal(stored, expanded)


def test_a_model_in_bfloat16_has_the_same_bits_in_any_chunks(files: Any) -> None:
    prompt = tokens_of(2, 49)
    bench = Bench(files("K_M", tied=True))
    assert bench.engine.decoder.dtype == torch.bfloat16
    assert torch.equal(bench.forced(prompt, CHUNKS), bench.forced(prompt, (1, 30, 18)))


def test_an_embedding_in_blocks_is_looked_up_on_as_many_threads_as_all_else(
    files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels learn the number of threads at the beginning of `using`, each thread that calls them for itself."""
    inside, rows = [], PackedBlocks.rows

    def noted(product: PackedBlocks, rows_m: Tensor) -> Tensor:
        inside.append(in_use())
        return rows(product, rows_m)

    monkeypatch.setattr(PackedBlocks, "rows", noted)
    Bench(files("Q8_0")).forced([1, 2, 3], [3])
    assert inside == [True]


def loaded(file: Path, *, keep: str = "as_stored", shard: Shard | None = None) -> Weights:
    weights = Weights(read_model_spec(file), torch.bfloat16, CPU, shard or Shard(), keep=keep)
    model_for(weights.spec).build(weights)
    weights.close()
    return weights


@pytest.mark.parametrize("kind", ["K_M", "Q4_1", "Q3_K"])
def test_weights_take_the_bytes_of_the_file(files: Any, kind: str) -> None:
    file = files(kind, tied=True)
    spec = read_model_spec(file)
    stored = sum(header.end - header.begin for header in spec.headers.values())
    weights = loaded(file)
    assert 0.97 * stored <= weights.nbytes <= 1.05 * stored, "norms are stored in float32, and kept in bfloat16"
    planned = {
        kept: weight_bytes(spec, config_from_dict({"engine": {"weights": kept}})) for kept in ("as_stored", "dense")
    }
    assert planned == {"as_stored": weights.nbytes, "dense": loaded(file, keep="dense").nbytes}
    assert planned["dense"] > 1.8 * planned["as_stored"]
    table = 2 * spec.headers["model.embed_tokens.weight"].shape[0] * 256
    assert weight_bytes(spec, config_from_dict({"engine": {"device": "cuda"}})) == planned["as_stored"]
    torch_alone = weight_bytes(spec, config_from_dict({"engine": {"device": "cuda", "attention": "torch"}}))
    assert torch_alone == planned["dense"] - table, "a CPU packs the head beside the embedding"


def test_a_tied_head_and_the_embedding_are_one_weight(files: Any) -> None:
    decoder = Bench(files("Q4_1", tied=True)).engine.decoder
    assert isinstance(decoder.embed_vh, RowExactLinear)
    assert decoder.head is decoder.embed_vh
    apart = Bench(files("Q4_1")).engine.decoder
    assert isinstance(apart.embed_vh, RowExactLinear)
    assert apart.head is not apart.embed_vh


def test_queries_keys_and_values_of_unlike_types_stay_as_they_are_stored(files: Any) -> None:
    weights = Weights(read_model_spec(files("K_M")), torch.float32, CPU).scope("model.layers.0.self_attn.")
    parts = [weights.weight(name, rows, 256) for name, rows in (("q_proj", 256), ("k_proj", 128), ("v_proj", 128))]
    stacked = weights.stacked(parts)
    weights.close()
    assert isinstance(stacked, BlockStack)
    assert [part.code.name for part in stacked.parts] == ["UINT4", "UINT4", "UINT6"]
    assert stacked.nbytes == sum(part.nbytes for part in parts) == weights.nbytes


@pytest.mark.parametrize("kind", ["K_M", "Q8_0"])
def test_ranks_share_the_bytes_of_the_file(files: Any, kind: str) -> None:
    """Of two ranks each has half of the layers; embedding and head are whole on both."""
    file = files(kind)
    spec = read_model_spec(file)
    both = [loaded(file, shard=Shard(rank, 2)) for rank in range(2)]
    whole = loaded(file)
    ends = sum(h.end - h.begin for name, h in spec.headers.items() if "layers" not in name)
    assert both[0].nbytes == both[1].nbytes
    assert both[0].nbytes + both[1].nbytes <= 1.02 * (whole.nbytes + ends)


def test_a_mapped_image_has_the_bits_and_one_copy(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file, prompt = files("K_M", tied=True), tokens_of(3, sum(CHUNKS))
    images = Images()
    expected = Bench(file, share_weights="off").forced(prompt, CHUNKS)
    for bench in (Bench(file, images=images), Bench(file, images=images)):
        assert torch.equal(bench.forced(prompt, CHUNKS), expected)
        assert bench.engine.decoder.head is bench.engine.decoder.embed_vh
    assert (len(images.kept), images.found) == (1, 1)
    (image,) = images.kept.values()
    assert len(image) < 1.1 * loaded(file).nbytes, "objects beside the weights are small"


@pytest.mark.parametrize(("kind", "engine", "words"), [
    ("K_M", {}, "GGUF Q4_K, Q6_K, as stored: 1.0 MiB a worker"),
    ("K_M", {"weights": "dense"}, "GGUF Q4_K, Q6_K, expanded: 1.0 MiB a worker"),
    ("K_M", {"attention": "torch"}, "GGUF Q4_K, Q6_K, expanded: 1.0 MiB a worker"),
    ("K_M", {"device": "cuda"}, "GGUF Q4_K, Q6_K, as stored: 1.0 MiB a worker"),
    ("K_M", {"device": "cuda", "attention": "torch"}, "GGUF Q4_K, Q6_K, expanded: 1.0 MiB a worker"),
    ("Q8_0", {}, "GGUF Q8_0, as stored: 1.0 MiB a worker"), ("F16", {}, ""),
])  # fmt: skip
def test_serve_tells_a_files_types_and_how_they_are_kept(
    files: Any, kind: str, engine: dict[str, str], words: str
) -> None:
    config = config_from_dict({"engine": engine})
    prepared: Any = SimpleNamespace(spec=read_model_spec(files(kind)), config=config, weights=1 << 20)
    assert weights_line(prepared) == words


def no_kernels(level: str = "") -> None:
    raise NativeUnavailable("g++ failed")


def test_where_torch_alone_computes_a_file_is_expanded(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(Bench(files("Q8_0"), attention="torch").engine.decoder.embed_vh, torch.Tensor)
    assert weights_kept(EngineConfig(), gpu=False, gguf=True) == "as_stored"
    assert weights_kept(EngineConfig(attention="torch"), gpu=False) == "as_stored"
    spec = read_model_spec(files("Q8_0"))
    config, planned = config_from_dict({}), weight_bytes(spec, config_from_dict({"engine": {"weights": "dense"}}))
    assert weight_bytes(spec, config) < planned
    monkeypatch.setattr(current_kernels, "load_library", no_kernels)
    assert weights_kept(EngineConfig(), gpu=False, gguf=True) == "dense"
    assert weight_bytes(spec, config) == planned
    assert isinstance(Bench(files("Q8_0")).engine.decoder.embed_vh, torch.Tensor)


def test_a_file_that_torch_alone_expands_is_of_the_class_of_expanded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(weights: str, *, gguf: bool) -> str:
        class_of.cache_clear()
        config = config_from_dict({"engine": {"weights": weights}}).engine
        return class_of(config, torch.bfloat16, CPU, gguf)

    assert named("as_stored", gguf=True) == named("as_stored", gguf=False) != named("dense", gguf=True)
    monkeypatch.setattr(current_kernels, "load_library", no_kernels)
    assert named("as_stored", gguf=True) == named("dense", gguf=True)
    assert named("as_stored", gguf=True) != named("as_stored", gguf=False), "a folder's blocks stay"
    class_of.cache_clear()


def test_expanded_weights_are_another_numerics_class() -> None:
    classes = {
        class_of(config_from_dict({"engine": {"weights": kept}}).engine, torch.bfloat16, CPU)
        for kept in ("as_stored", "dense")
    }
    assert len(classes) == 2
