"""Rows with adapters (LoRA) in one step: their bits, the families they fit, and folders that PEFT itself writes."""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import random
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from tests.engine.harness import GREEDY, Bench
from tests.engine.test_step_graphs import Blind
from tests.support.adapters import make_adapter, merged
from tests.support.checkpoints import Oracle, compare
from tests.support.model_families import EVERY
from tests.support.served_cluster import until
from twinpool.contracts.checkpoint.adapter_files import adapter_ref, read_adapter_files
from twinpool.contracts.config.worker_config import AdaptersConfig
from twinpool.contracts.errors import CheckpointError
from twinpool.contracts.sampling_params import AdapterRef, TokenLogprob
from twinpool.engine.layers.decoder import Decoder
from twinpool.engine.runner.batch import TokenDraw
from twinpool.engine.runner.graphs.step_graphs import StepGraphs
from twinpool.engine.tensors.adapters import AdapterFolders, AdapterStore, load_adapter

LOGPROBS = structs.replace(GREEDY, logprobs=5)
FUSED = ("qkv_proj", "gate_up_proj", "o_proj", "down_proj")
TARGETS = {"phi3": FUSED, "glm4": (*FUSED[1:], "q_proj", "k_proj", "v_proj")}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A checkpoint of a family."""
    base = tmp_path_factory.mktemp("adapted")
    return cache(lambda name, dtype="float32": EVERY[name](base / f"{name}-{dtype}", dtype=dtype))


def store_of(settings: AdaptersConfig, decoder: Decoder) -> AdapterStore:
    files = AdapterFolders(settings, decoder.adapted, decoder.dtype, torch.device("cpu"), decoder.kernels)
    return AdapterStore(settings.max_loaded, files)


def bench_with(folder: Path, root: Path, **options: Any) -> Bench:
    bench = Bench(folder, **options)
    decoder, settings = bench.engine.decoder, AdaptersConfig(roots=str(root))
    bench.engine.adapters = store_of(settings, decoder)
    return bench


def load(bench: Bench, path: Path) -> AdapterRef:
    """Have an adapter in memory. Raises as `AdapterStore.wants` does."""
    ref = adapter_ref(path.name, str(path), ["/"], 64)
    assert bench.engine.adapters is not None
    end = time.monotonic() + 60
    while not bench.engine.adapters.wants(ref):
        assert time.monotonic() < end
    return ref


Sequences = Sequence[tuple[list[int], AdapterRef | None]]


def answers(bench: Bench, asked: Sequences, count: int) -> list[list[tuple[int, TokenLogprob | None]]]:
    """Greedy tokens of sequences that go through steps together, with their log-probabilities."""
    held = [bench.hold(len(prompt) + count) for prompt, _ in asked]
    tokens = [list(prompt) for prompt, _ in asked]
    found: list[list[tuple[int, TokenLogprob | None]]] = [[] for _ in asked]
    for step in range(count):
        rows = []
        for (prompt, adapter), mine, one in zip(asked, held, tokens, strict=True):
            start = len(one) - 1 if step else 0
            rows.append(bench.row(one[start:], start, mine, TokenDraw(LOGPROBS, one, len(prompt)), adapter=adapter))
        for one, out, into in zip(tokens, bench.engine.forward(rows), found, strict=True):
            assert out.drawn is not None
            one.append(out.drawn.token)
            into.append((out.drawn.token, out.drawn.logprob))
    for mine in held:
        bench.drop(mine)
    return found


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(sum(lengths))
    return [[rng.randrange(300) for _ in range(n)] for n in lengths]


@pytest.mark.parametrize("options", [{"attention": "native"}, {"attention": "torch"}], ids=["native", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neighbours_and_their_adapters_change_no_bit_of_a_row(
    made: Callable[..., Path], tmp_path: Path, options: dict[str, Any], dtype: str
) -> None:
    folder = made("llama", dtype)
    paths = [make_adapter(tmp_path / f"a{rank}", made("llama"), rank, seed=rank) for rank in (4, 7, 32)]
    bench = bench_with(folder, tmp_path, **options)
    refs = [load(bench, path) for path in paths]
    asked = list(zip(prompts(3, 17, 8, 70, 5, 12), [None, refs[0], refs[0], refs[1], None, refs[2]], strict=True))
    together = answers(bench, asked, 5)
    for one, expected in zip(asked, together, strict=True):
        assert answers(bench, [one], 5) == [expected]
    assert answers(bench, asked[::-1], 5) == together[::-1]
    bench.engine.graphs = cast(StepGraphs, Blind(bench.engine.decoder))
    assert answers(bench, asked[:4], 2) == [one[:2] for one in together[:4]], "a graph has no input for adapters"
    bare = bench_with(folder, tmp_path, **options)
    assert answers(bare, [asked[0], asked[4]], 5) == [together[0], together[4]]


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("name", ["phi3", "glm4", "qwen2", "gemma3", "qwen2_moe", "starcoder2"])
def test_adapters_of_families_are_those_of_models_with_them_merged_in(
    made: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    folder = made(name)
    targets = TARGETS.get(name, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "c_fc"))
    path = make_adapter(tmp_path / "a", folder, 8, targets=targets, without="experts.")
    bench = bench_with(folder, tmp_path)
    ref = load(bench, path)
    asked = [(prompt, ref) for prompt in prompts(40, 9)]
    oracle = Oracle(merged(tmp_path / "merged", folder, path))
    for (prompt, _), found in zip(asked, answers(bench, asked, 8), strict=True):
        verdict = compare(oracle, prompt, [token for token, _ in found])
        assert verdict.equal, verdict


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("by_root", [True, False], ids=["by the rank's root", "by the rank"])
def test_a_folder_that_peft_writes_is_what_peft_computes(
    made: Callable[..., Path], tmp_path: Path, *, by_root: bool
) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    folder = made("qwen3")
    config = peft.LoraConfig(
        r=8, lora_alpha=12, use_rslora=by_root, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
        rank_pattern={"down_proj": 4}, alpha_pattern={"layers.0.self_attn.q_proj": 30}, task_type="CAUSAL_LM",
    )  # fmt: skip
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0.0, 0.3)
    model.save_pretrained(tmp_path / "a")
    bench = bench_with(folder, tmp_path)
    (prompt,), ref = prompts(30), load(bench, tmp_path / "a")
    (found,) = answers(bench, [(prompt, ref)], 12)
    with torch.no_grad():
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert [token for token, _ in found] == tokens[0, len(prompt) :].tolist()


def test_an_adapter_that_does_not_fit_the_model_is_refused_by_the_name_of_its_layer(
    made: Callable[..., Path], tmp_path: Path
) -> None:
    bench = bench_with(made("llama"), tmp_path)
    head = make_adapter(tmp_path / "head", made("llama"), 4, targets=["lm_head"])
    with pytest.raises(CheckpointError, match="lm_head is no layer of this model that an adapter may add to"):
        load(bench, head)
    other = make_adapter(tmp_path / "other", EVERY["llama"](tmp_path / "wide", hidden=96), 4)
    with pytest.raises(CheckpointError, match=r"down_proj make a weight \[96, 192\]; the model's is \[64, 128\]"):
        load(bench, other)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "use_dora is not supported"),
    "modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
    "bias": ({"bias": "all"}, "bias 'all' is not supported"),
    "experts": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters is not supported"),
    "kind": ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
    "begun": ({"init_lora_weights": "pissa_niter_4"}, "changes the model's own weights"),
    "unknown": ({"use_newer": {"way": 1}}, "use_newer is not supported: it isn't known here"),
    "untargeted": ({"target_modules": ["q_proj"]}, "has factors, and target_modules leaves it out"),
    "rank": ({"r": 5}, "and the rank is 5"),
    "alpha": ({"alpha_pattern": {"q_proj": "x"}}, "no positive number"),
    "no alpha": ({"lora_alpha": math.inf}, "its lora_alpha is inf"),
    "part of a rank": ({"rank_pattern": {"q_proj": 4.5}}, "and the rank is 4.5"),
    "for ever": ({"rank_pattern": {"([a-z._0-9]+)+!": 4}}, "too elaborate"),
    "for long": ({"target_modules": "a*a*a*a*b"}, "repeats more than 3 things"),
    "deep": ({"alpha_pattern": {"(" * 505 + ")" * 505: 4}}, "is no regular expression"),
    "huge": ({"alpha_pattern": {"a{99999999999999}": 4}}, "is no regular expression"),
}


@pytest.mark.parametrize("value", [torch.nan, 3e38], ids=["none", "none any more, with the scale"])
def test_factors_that_are_no_numbers_are_refused_before_a_row_has_them(
    made: Callable[..., Path], tmp_path: Path, value: float
) -> None:
    bench, path = bench_with(made("llama"), tmp_path), make_adapter(tmp_path / "a", made("llama"), 4)
    tensors = load_file(path / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"][3, 1] = value
    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.q_proj aren't all finite numbers"):
        load(bench, path)


def test_a_file_that_changes_while_it_is_read_is_refused(made: Callable[..., Path], tmp_path: Path) -> None:
    """Its digest is of what it was: pages and answers that are found by that would be of another adapter."""
    decoder, path = Bench(made("llama")).engine.decoder, make_adapter(tmp_path / "a", made("llama"), 4)
    files, file = read_adapter_files(path, 64), path / "adapter_model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match="has changed while it was read"):
        load_adapter(files, decoder.adapted, decoder.dtype, torch.device("cpu"))


def test_a_load_that_nobody_waits_for_any_more_keeps_no_others_out(made: Callable[..., Path], tmp_path: Path) -> None:
    """Requests for two adapters are gone before these are read: a worker that may hold two loads a third one."""
    paths = [make_adapter(tmp_path / str(seed), made("llama"), 4, seed=seed) for seed in range(3)]
    decoder, settings = Bench(made("llama")).engine.decoder, AdaptersConfig(roots=str(tmp_path), max_loaded=2)
    store = store_of(settings, decoder)
    refs = [adapter_ref("a", str(path), [str(tmp_path)], 64) for path in paths]
    assert [store.wants(ref) for ref in refs[:2]] == [False, False]
    until(lambda: store.wants(refs[2]), "the third one to be read")
    assert refs[2].digest in store.loaded
    for ref in (*refs, refs[1]):
        until(lambda ref=ref: store.wants(ref), "each to be read")  # type: ignore[misc]
        assert len(store.loaded) <= 2


def test_the_least_recently_wanted_makes_way_and_leaves_memory(made: Callable[..., Path], tmp_path: Path) -> None:
    paths = [make_adapter(tmp_path / str(seed), made("llama"), 4, seed=seed) for seed in range(3)]
    decoder, settings = Bench(made("llama")).engine.decoder, AdaptersConfig(roots=str(tmp_path), max_loaded=2)
    store = store_of(settings, decoder)
    refs = [adapter_ref("a", str(path), [str(tmp_path)], 64) for path in paths]
    for ref in (refs[0], refs[1], refs[0]):
        until(lambda ref=ref: store.wants(ref), "each to be read")  # type: ignore[misc]
    store.held([*store.loaded.values()])  # As a step of both has it.
    until(lambda: store.wants(refs[2]), "the third one to be read")
    assert [*store.loaded] == [refs[0].digest, refs[2].digest]
    assert store.held([]).adapters == (), "what no step has is in no table"


def test_an_adapter_that_could_not_be_read_is_read_once_its_folder_is_mended(
    made: Callable[..., Path], tmp_path: Path
) -> None:
    """What wants it is told each time, and it takes no place of others meanwhile."""
    path, other = (make_adapter(tmp_path / name, made("llama"), 4, seed=len(name)) for name in ("a", "other"))
    decoder, settings = Bench(made("llama")).engine.decoder, AdaptersConfig(roots=str(tmp_path), max_loaded=1)
    store = store_of(settings, decoder)
    ref, another = (adapter_ref(one.name, str(one), [str(tmp_path)], 64) for one in (path, other))

    def ends(wanted: AdapterRef) -> str:
        """How it ends for who wants this adapter."""
        try:
            until(lambda: store.wants(wanted), "the adapter to be read")
        except CheckpointError as error:
            return str(error)
        return "read"

    file = path / "adapter_config.json"
    whole = file.read_text()
    file.write_text(whole + " ")
    for _ in range(2):
        assert "are others than when it was loaded" in ends(ref)
    assert not store.wants(ref)
    assert ends(another) == "read", "what became of one is told nobody else"
    file.write_text(whole)
    assert ends(ref) == "read"
    assert ends(another) == "read"
    store.close()


def test_an_adapter_for_which_there_is_no_memory_is_refused_and_loaded_once_there_is(
    made: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_adapter(tmp_path / "a", made("llama"), 4)
    decoder, settings = Bench(made("llama")).engine.decoder, AdaptersConfig(roots=str(tmp_path), max_loaded=1)
    store = store_of(settings, decoder)
    ref = adapter_ref("a", str(path), [str(tmp_path)], 64)

    def full(*_: object) -> object:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as short:
        short.setattr(mmap, "mmap", full)
        with pytest.raises(CheckpointError, match=r"cannot load .*Cannot allocate memory"):
            until(lambda: store.wants(ref), "the adapter to be refused")
    until(lambda: store.wants(ref), "the adapter to be read")
    store.close()


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_plain_adapter_is_refused_by_the_name_of_its_field(
    made: Callable[..., Path], tmp_path: Path, case: str
) -> None:
    changes, says = REFUSED[case]
    path = make_adapter(tmp_path / "a", made("llama"), 4, **changes)
    with pytest.raises(CheckpointError, match=says.replace("(", r"\(")):
        adapter_ref("a", str(path), [str(tmp_path)], 64)


def test_a_rank_above_the_highest_is_refused_and_a_name_that_could_mislead(
    made: Callable[..., Path], tmp_path: Path
) -> None:
    path = make_adapter(tmp_path / "a", made("llama"), 9)
    with pytest.raises(CheckpointError, match=r"its rank 9 is above adapters\.max_rank=8"):
        adapter_ref("a", str(path), [str(tmp_path)], 8)
    with pytest.raises(CheckpointError, match="an adapter's name has"):
        adapter_ref("a\nb", str(path), [str(tmp_path)], 64)


def test_only_folders_below_the_roots_are_read_whatever_links_say(made: Callable[..., Path], tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "out" / "a", made("llama"), 4)
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(path)
    (root / "files").mkdir()
    for file in path.iterdir():
        (root / "files" / file.name).symlink_to(file)
    (root / "empty").mkdir()
    outside = (path, root / "link", root / "files", root / ".." / "out" / "a", tmp_path / "nowhere")
    for where in outside:
        with pytest.raises(CheckpointError, match=r"lies below none of adapters\.roots"):
            adapter_ref("a", str(where), [str(root)], 64)
    with pytest.raises(CheckpointError, match="cannot read"):
        adapter_ref("a", str(root / "empty"), [str(root)], 64)
    with pytest.raises(CheckpointError, match="absolute path"):
        adapter_ref("a", "out/a", [str(root)], 64)
    assert adapter_ref("a", str(path), [str(path)], 64).path == str(path)


def test_the_digest_is_another_one_when_either_file_changes(made: Callable[..., Path], tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a", made("llama"), 4)
    first = adapter_ref("a", str(path), ["/"], 64).digest
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 17}))
    second = adapter_ref("a", str(path), ["/"], 64).digest
    raw = bytearray((path / "adapter_model.safetensors").read_bytes())
    raw[-1] ^= 1
    (path / "adapter_model.safetensors").write_bytes(raw)
    assert len({first, second, adapter_ref("a", str(path), ["/"], 64).digest}) == 3
