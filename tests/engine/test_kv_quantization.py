"""Quantised keys and values: the definition, the kernels that read them, and the same bits in any batch and chunks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engine.harness import Bench, MakeCheckpoint
from tests.engine.native import BUILDS, kernels_or_skip
from tests.support.listed_plans import listed_plan
from tests.support.model_families import FAMILIES
from tests.support.quantised_cache import rounded
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.memory.kv_cache_spec import BufferSpec
from twinpool.cache.memory.page_moves import describe_spec
from twinpool.cluster.assembly.build_parts import numerics_class_of
from twinpool.cluster.assembly.memory_plan import plan_memory, state_options
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ConfigError, LayoutMismatch
from twinpool.contracts.ids import Role, WorkerName
from twinpool.engine.attention.attention_backend import ScoreOptions
from twinpool.engine.attention.kv_quantization import KVScales, dequantise, quantise, with_scales
from twinpool.engine.attention.torch_backend.torch_attention import NativeAttention, TorchAttention
from twinpool.engine.models.model_base import StateOptions
from twinpool.engine.models.registry import read_model
from twinpool.engine.runner.kernel_choice import check_state, refused_state
from twinpool.engine.tensors.row_exact_linear import FAST, Numerics
from twinpool.transfer.rooms.peers import fingerprint, refuse_mismatch
from twinpool.transfer.rooms.room_messages import Hello

CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
CPU = torch.device("cpu")
LENGTH, HEADS, KV_HEADS, DIM = 270, 6, 2, 40


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=CODES)
def kv_dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_read_back_as_the_definition_says_whatever_their_size(kv_dtype: str, dtype: torch.dtype) -> None:
    largest = torch.logspace(-30, 30, 500).view(-1, 1, 1)
    entries = (draw(1, 500, 3, 24) * largest).to(dtype)
    entries[7], entries[8, 1] = 0, 0
    # A scale of 1, and numbers halfway between two codes, of which the even one is taken.
    ties = torch.tensor(
        [448.0, 17.0, 19.0, 2**-10, 3 * 2**-10] if kv_dtype == "fp8" else [127.0, 0.5, 1.5, -2.5, 126.5]
    )
    entries[9, :, :5], entries[9, :, 5:] = ties.to(dtype), 0
    codes, scales = quantise(entries, CODES[kv_dtype])
    assert codes.shape == entries.shape and scales.shape == entries.shape[:-1]  # noqa: PT018
    read = dequantise(codes, scales)
    assert torch.equal(read, rounded(entries, kv_dtype))
    assert not read[7].any() and not scales[7].any(), "zeros are zeros, codes and scales"  # noqa: PT018
    relative = (read - entries.float()).abs().amax(-1) / entries.float().abs().amax(-1).clamp_min(1e-38)
    assert relative.max() < (0.05 if kv_dtype == "fp8" else 0.01)


class Stored:
    """Codes and scales of two sequences' keys and values, in pages that lie anywhere; the pages of nobody are full of
    what would show."""

    def __init__(self, rows: list[tuple[int, int, int]], kv_dtype: str, dtype: torch.dtype, page_tokens: int) -> None:
        """`rows`: sequences with the first and the number of their queries."""
        used = [-(-(start + count) // page_tokens) for _, start, count in rows]
        free = torch.randperm(sum(used), generator=torch.Generator().manual_seed(1)).add(1).tolist()
        tables = [[free.pop() for _ in range(count)] for count in used]
        shape = (sum(used) + 1, page_tokens, KV_HEADS, DIM)
        self.k, self.v = (torch.full(shape, 100.0).to(CODES[kv_dtype]) for _ in "kv")
        self.scales = KVScales(*(torch.full(shape[:3], torch.nan, dtype=torch.bfloat16) for _ in "kv"))
        for pages, scales in zip((self.k, self.v), self.scales, strict=True):
            pages[0], scales[0] = 0, 0
        for (sequence, start, count), table in zip(rows, tables, strict=True):
            at = torch.tensor([table[p // page_tokens] * page_tokens + p % page_tokens for p in range(start + count)])
            for seed, pages, scales in ((10, self.k, self.scales.keys), (20, self.v, self.scales.values)):
                entries = draw(seed + sequence, LENGTH, KV_HEADS, DIM)[: start + count].to(dtype)
                entries *= 1 + torch.arange(len(entries)).remainder(7).view(-1, 1, 1)  # Scales differ.
                codes, factors = quantise(entries, pages.dtype)
                pages.view(torch.uint8).view(-1, KV_HEADS, DIM)[at] = codes.view(torch.uint8)
                scales.view(-1, KV_HEADS)[at] = factors
        self.plan = listed_plan([s for _, s, _ in rows], [n for *_, n in rows], tables, page_tokens, CPU)
        queries = [draw(30 + n, LENGTH, HEADS, DIM)[start : start + count] for n, start, count in rows]
        self.q = torch.cat(queries).to(dtype)

    def attend(self, attention: TorchAttention) -> Tensor:
        return attention.attend(self.q, self.k, self.v, self.plan, ScoreOptions(0.1), self.scales)

    def plain(self) -> Tensor:
        """The twin's answer for what the codes stand for, in float32."""
        k, v = (dequantise(*each).nan_to_num() for each in zip((self.k, self.v), self.scales, strict=True))
        return TorchAttention(Numerics(16)).attend(self.q.float(), k, v, self.plan, ScoreOptions(0.1))


@pytest.mark.parametrize("build", [None, *(pytest.param(each, marks=pytest.mark.slow) for each in BUILDS)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_reads_what_codes_stand_for_with_the_same_bits_in_any_company(
    kv_dtype: str, dtype: torch.dtype, build: str | None
) -> None:
    attention = TorchAttention(Numerics(16)) if build is None else NativeAttention(FAST, kernels_or_skip(build))
    stored = Stored([(0, 0, LENGTH)], kv_dtype, dtype, 16)
    want = stored.attend(attention)
    tolerance = 2e-5 if dtype == torch.float32 else 2**-5
    torch.testing.assert_close(want.float(), stored.plain(), rtol=tolerance, atol=tolerance)
    for page_tokens, cuts in ((1, (0, 17, 270)), (64, (0, 64, 65, 257, 270)), (16, (0, 127, 261, 269, 270))):
        for first, end in pairwise(cuts):
            rows = [(2, 5, 9), (0, first, end - first), (1, 250, 1)]
            got = Stored(rows, kv_dtype, dtype, page_tokens).attend(attention)
            assert torch.equal(got[9:-1], want[first:end]), (page_tokens, first, end)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["torch", "native"])
def test_stored_bytes_and_tokens_are_the_same_in_any_chunks(
    checkpoint: MakeCheckpoint, kv_dtype: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if attention == "native":
        kernels_or_skip()
    monkeypatch.setattr(Bench, "drop", lambda self, held: None)  # It would spoil the pages, alike in each bench.
    prompt = [int(x) for x in torch.randint(300, (70,), generator=torch.Generator().manual_seed(4))]
    folder, pages, answers = checkpoint("llama"), [], []
    for chunk in (70, 16, 7, 1):
        bench = Bench(folder, options={"kv_codes": CODES[kv_dtype]}, attention=attention)
        held = bench.pools.layout.buffers["full"]
        assert [b.spec.name for b in held] == ["k", "v", "k_scale", "v_scale"]
        first = bench.free[:5]
        answers.append(bench.generate(prompt, 8, chunk))
        pages.append([bench.layers[1][b.spec.name][first].view(torch.uint8).clone().flatten(1)[:4] for b in held])
    assert all(answer == answers[0] for answer in answers)
    for others in pages[1:]:
        assert all(torch.equal(a, b) for a, b in zip(pages[0], others, strict=True))
    plain = Bench(folder, attention=attention)
    first = plain.free[:4]
    plain.generate(prompt, 1, 1)
    for name in "kv":
        want, coded = plain.layers[0][name][first], bench.layers[0]
        found = dequantise(coded[name][first], coded[f"{name}_scale"][first])
        torch.testing.assert_close(found, want.float(), rtol=2**-3, atol=2**-5)


def test_a_worker_holds_almost_twice_the_positions_in_the_same_memory(tmp_path: Path, kv_dtype: str) -> None:
    """Heads of 64: a key takes 66 bytes instead of 128; of MLA, whose rows have 40 numbers here, 42 instead of 80."""
    latents = read_model(FAMILIES["deepseek_v3"](tmp_path / "latents", dtype="bfloat16"))
    options = StateOptions(torch.bfloat16, 16)
    coded = replace(options, kv_codes=CODES[kv_dtype])
    assert latents.pool_set(coded).page_bytes / latents.pool_set(options).page_bytes == 42 / 80
    model = read_model(FAMILIES["llama"](tmp_path / "model", dtype="bfloat16", head_dim=64))
    found = {}
    for name in ("auto", kv_dtype):
        config = config_from_dict({"cache": {"kv_dtype": name}})
        spec = model.pool_set(state_options(model.spec, config, Role.DECODE))
        plan = plan_memory(spec, config, Role.DECODE, model.spec.context, 4 << 20)
        assert plan is not None
        found[name] = (spec.page_bytes, plan.positions)
    assert found[kv_dtype][0] / found["auto"][0] == 66 / 128
    assert 1.9 < found[kv_dtype][1] / found["auto"][1] < 2


def test_scales_follow_their_heads_and_latents_have_one_a_token() -> None:
    heads = BufferSpec("k", 3, (4, 64), torch.bfloat16, heads=8, first_head=4)
    codes, scales = with_scales((heads,), torch.int8)
    assert (codes.dtype, codes.shape, codes.first_head, codes.heads) == (torch.int8, (4, 64), 4, 8)
    assert (scales.name, scales.dtype, scales.shape) == ("k_scale", torch.bfloat16, (4,))
    assert (scales.layers, scales.index, scales.first_head, scales.heads) == (3, heads.index, 4, 8)
    assert with_scales((BufferSpec("latent", 2, (576,), torch.bfloat16),), torch.int8)[1].shape == (1,)
    assert with_scales((heads,), None) == (heads,)


def test_workers_of_unlike_kv_dtypes_refuse_each_other_by_name_and_gpus_refuse_codes(tmp_path: Path) -> None:
    model = read_model(FAMILIES["llama"](tmp_path / "model"))
    specs, prints, classes = {}, {}, set()
    for name in ("auto", "fp8", "int8"):
        config = config_from_dict({"cache": {"kv_dtype": name}})
        specs[name] = model.pool_set(state_options(model.spec, config, Role.PREFILL))
        prints[name] = fingerprint("weights", specs[name], "invariant:x")
        classes.add(numerics_class_of(config, model.spec, CpuDevice()))
        assert bool(refused_state(specs[name], 90)) == (name != "auto")
    assert len({each.layout for each in prints.values()}) == len(classes) == 3
    hello = Hello("decode-0", 1, 1, prints["int8"], describe_spec(specs["int8"]), "shm", {}, 1, 1, "boot")
    told = r"buffers\.k\.dtype: prefill-0 has float8_e4m3fn, decode-0 has int8"
    with pytest.raises(LayoutMismatch, match=told):
        refuse_mismatch(WorkerName("prefill-0"), prints["fp8"], describe_spec(specs["fp8"]), "shm", hello)
    with pytest.raises(ConfigError, match=r"cache\.kv_dtype \(k, v\) computes on CPUs; use cache\.kv_dtype=auto"):
        check_state(specs["fp8"], CPU, triton=True)
    with pytest.raises(ConfigError, match=r"cuda: cache\.kv_dtype \(k, v\) computes on CPUs"):
        check_state(specs["fp8"], torch.device("cuda"), triton=False)
    check_state(specs["fp8"], CPU, triton=False)
