"""A checkpoint folder is read in both spellings; a bad one is refused at once, in one line that says what is wrong."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.harness import Bench, MakeCheckpoint
from tests.support.checkpoints import VOCAB, copy_checkpoint
from tests.support.plain_drafts import make_eagle3
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import CheckpointError, ConfigError
from twinpool.engine.attention.torch_backend.torch_attention import TorchAttention
from twinpool.engine.models.llama import Llama
from twinpool.engine.models.registry import model_for, read_model
from twinpool.engine.runner.kernel_choice import attention_for, dtype_for
from twinpool.engine.tensors import weight_loader as weights
from twinpool.engine.tensors.row_exact_linear import FAST
from twinpool.engine.tensors.weight_loader import Weights

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"


def edit(name: str, **values: object) -> Callable[[Path], None]:
    """Change keys of a JSON file of the folder; None removes a key."""

    def change(folder: Path) -> None:
        old = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({k: v for k, v in (old | values).items() if v is not None}))

    return change


def config(**values: object) -> Callable[[Path], None]:
    return edit("config.json", **values)


def rope(**numbers: object) -> Callable[[Path], None]:
    return config(rope_parameters={"rope_theta": 10000.0, **numbers})


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        change(held)
        save_file(held, folder / "model.safetensors", {"format": "pt"})

    return apply


def cut(keep: int) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])

    return apply


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: bytes) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return apply


def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda held: held.update({name: tensor})


DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.norm.weight"
SHORT_HEADER = struct.pack("<Q", 1 << 40) + b"{}"
REFUSALS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "no config": (remove("config.json"), ("has no config.json",)),
    "config no json": (write("config.json", b"{"), ("config.json is not JSON",)),
    "config no object": (write("config.json", b"[]"), ("must hold a JSON object",)),
    "no tensors": (remove("model.safetensors"), ("has no model.safetensors and no model.safetensors.index.json",)),
    "empty file": (cut(0), ("is truncated", "0 bytes")),
    "header cut": (cut(300), ("is truncated",)),
    "data cut": (cut(50_000), ("is truncated: it has 50000 bytes",)),
    "header too long": (write("model.safetensors", SHORT_HEADER), ("is truncated",)),
    "header no json": (write("model.safetensors", struct.pack("<Q", 4) + b"{{{{"), ("malformed",)),
    "missing tensor": (tensors(lambda held: held.pop(DOWN)), (DOWN, "is missing")),
    "untied without head": (tensors(lambda held: held.pop("lm_head.weight")), ("lm_head.weight is missing",)),
    "wrong shape": (tensors(put(DOWN, torch.zeros(64, 100))), (DOWN, "[64, 100]", "[64, 128]")),
    "wrong vocab": (config(vocab_size=301), ("embed_tokens", "[300, 64]", "[301, 64]")),
    "integers": (tensors(put(NORM, torch.zeros(64, dtype=torch.int8))), (NORM, "I8", "F32, BF16, F16")),
    "architecture": (
        config(architectures=["GPT2LMHeadModel"]),
        ("GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"),
    ),
    "no architecture": (config(architectures=None, model_type="t5"), ("t5", "supported are")),
    "quantised": (config(quantization_config={"quant_method": "aqlm"}), ("quantised by 'aqlm'", "supported are")),
    "activation": (config(hidden_act="gelu"), ("'gelu'", "only silu")),
    "dtype": (config(dtype="float8_e4m3fn"), ("float8_e4m3fn", "bfloat16")),
    "heads": (config(num_attention_heads=3, head_dim=16), ("3 attention heads", "2 key-value heads")),
    "odd head": (config(head_dim=15), ("head_dim 15 must be even",)),
    "size missing": (config(num_hidden_layers=None), ("has no num_hidden_layers",)),
    "size no number": (config(hidden_size="64"), ("hidden_size must be a positive whole number", "'64'")),
    "size zero": (config(num_hidden_layers=0), ("num_hidden_layers", "got 0")),
    "layers sliding": (config(layer_types=["full_attention", "sliding_attention"]), ("sliding_attention layers",)),
    "rope unknown": (
        rope(rope_type="spiral"),
        ("unknown rope scaling 'spiral'", "default, linear, dynamic, llama3, yarn"),
    ),
    "rope dynamic": (rope(rope_type="dynamic"), ("'dynamic' needs a positive factor", "None")),
    "rope longrope": (rope(rope_type="longrope"), ("'longrope' needs a list of positive numbers short_factor",)),
    "rope number": (rope(rope_type="linear"), ("'linear' needs a positive factor", "None")),
    "rope theta": (config(rope_parameters={"rope_type": "default", "rope_theta": -1}), ("positive rope_theta", "-1")),
    "rope partial": (rope(rope_type="default", partial_rotary_factor=0.5), ("partial_rotary_factor 0.5",)),
    "rope no object": (config(rope_parameters="linear"), ("must be an object", "'linear'")),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_bad_folder_is_refused_in_one_line_that_says_what_is_wrong(
    checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """At once, too: no tensor is read for it, however many gigabytes there are."""

    def read(*arguments: object, **options: object) -> None:
        raise AssertionError("a tensor is read")

    change, says = REFUSALS[case]
    folder = copy_checkpoint(checkpoint("llama"), tmp_path / "model")
    change(folder)
    monkeypatch.setattr(weights, "safe_open", read)
    with pytest.raises(CheckpointError) as caught:
        read_model(folder)
    assert "\n" not in str(caught.value)
    for part in says:
        assert part in str(caught.value)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere does not exist"):
        read_model_spec(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: next(folder.glob("model-00002*")).unlink(), "cannot read"),
        (edit(INDEX, weight_map=None), "has no weight_map"),
        (edit(INDEX, weight_map={NORM: "../model.safetensors"}), None),
    ],
)
def test_a_sharded_checkpoint_with_a_part_missing_is_refused(
    checkpoint: MakeCheckpoint, tmp_path: Path, change: Callable[[Path], None], says: str | None
) -> None:
    folder = copy_checkpoint(checkpoint("llama", shards=3), tmp_path / "model")
    change(folder)
    with pytest.raises(CheckpointError, match=says):
        read_model_spec(folder)


def test_both_spellings_and_any_sharding_are_the_same_model(checkpoint: MakeCheckpoint) -> None:
    for scaling in ("default", "linear", "llama3", "yarn"):
        new = read_model_spec(checkpoint("llama", rope=scaling))
        old = read_model_spec(checkpoint("llama", rope=scaling, old_spelling=True))
        assert replace(old, path=new.path, name=new.name) == new
        model = model_for(new)
        assert isinstance(model, Llama)
        assert model.rope.kind == scaling
    sharded = read_model_spec(checkpoint("llama", shards=3))
    assert sharded.fingerprint == read_model_spec(checkpoint("llama")).fingerprint


def test_a_checkpoint_that_was_saved_without_a_head_has_no_root_in_its_names(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """As those for embeddings are: ``layers.0...`` for ``model.layers.0...``."""
    plain = checkpoint("llama")
    bare = copy_checkpoint(plain, tmp_path / "bare")
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(plain / "model.safetensors").items()}
    save_file(tensors, bare / "model.safetensors")
    assert "embed_tokens.weight" in tensors
    assert Bench(bare).generate(range(5, 30), 4) == Bench(plain).generate(range(5, 30), 4)


def test_other_weights_and_other_numbers_have_other_fingerprints(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    base = checkpoint("llama")
    last_byte = copy_checkpoint(base, tmp_path / "byte")
    path = last_byte / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    folders = [
        base,
        checkpoint("llama", seed=5),
        checkpoint("llama", dtype="bfloat16"),
        checkpoint("llama", rope="linear"),
        copy_checkpoint(base, tmp_path / "eps", rms_norm_eps=1e-5),
        last_byte,
    ]
    assert len({read_model_spec(folder).fingerprint for folder in folders}) == len(folders)


def test_what_drafts_is_part_of_a_models_fingerprint(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Pages have its state, too, so workers with another one must refuse each other."""
    base = checkpoint("llama")
    heads = [make_eagle3(tmp_path / f"{known}", hidden=64, vocab=VOCAB, known=range(known)) for known in (7, 9)]
    drafts = ["", "mtp", *map(str, heads)]
    assert len({read_model_spec(base, draft_model=draft).fingerprint for draft in drafts}) == len(drafts)


def test_end_tokens_and_defaults_come_from_the_generation_config_first(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = copy_checkpoint(checkpoint("llama"), tmp_path / "model", eos_token_id=[7, 8])
    (folder / "tokenizer_config.json").unlink()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 5, "temperature": 0.6, "top_k": 20}))
    spec = read_model_spec(folder)
    assert spec.eos_token_ids == (5,)
    assert spec.generation_defaults == {"temperature": 0.6, "top_k": 20.0}
    (folder / "generation_config.json").unlink()
    assert read_model_spec(folder).eos_token_ids == (7, 8)


def _with_tokenizer(folder: Path, added: list[dict[str, Any]], **config: Any) -> Path:
    tree = {"version": "1.0", "added_tokens": added, "model": {"type": "BPE", "vocab": {}, "merges": []}}
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("eos_token", "decoder", "ends"),
    [
        ("<|im_end|>", None, (5, 9)),
        ({"content": "<|im_end|>", "lstrip": False}, None, (5, 9)),
        ("<|im_end|>", {"11": {"content": "<|im_end|>", "special": True}}, (5, 11)),
        ("</s>", None, (5,)),
        ("nowhere", None, (5,)),
        (None, None, (5,)),
    ],
)
def test_the_tokenizers_end_is_one_beside_those_of_the_generation_config(
    checkpoint: MakeCheckpoint, tmp_path: Path, eos_token: object, decoder: object, ends: tuple[int, ...]
) -> None:
    """A fine-tune on chats sets the tokenizer's, and leaves its base model's generation config as it was."""
    folder = copy_checkpoint(checkpoint("llama"), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    added = [{"id": 5, "content": "</s>", "special": True}, {"id": 9, "content": "<|im_end|>", "special": True}]
    if decoder:  # A tokenizer.json that lacks it: of one that has it, its id counts.
        added.pop()
    _with_tokenizer(folder, added, eos_token=eos_token, **({"added_tokens_decoder": decoder} if decoder else {}))
    assert read_model_spec(folder).eos_token_ids == ends


def test_an_end_beyond_the_vocabulary_is_left_out_and_said(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = copy_checkpoint(checkpoint("llama"), tmp_path / "model", eos_token_id=None)
    (folder / "tokenizer_config.json").unlink()
    size = read_model_spec(folder).vocab_size
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, size, -1]}))
    spec = read_model_spec(folder)
    assert spec.eos_token_ids == (5,)
    assert [f"[{size}, -1]" in warning for warning in spec.warnings] == [True]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, size - 1]}))
    assert (read_model_spec(folder).eos_token_ids, read_model_spec(folder).warnings) == ((5, size - 1), ())


def test_the_head_dimension_has_the_architectures_default(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = copy_checkpoint(checkpoint("llama"), tmp_path / "llama", head_dim=None)
    model = read_model(folder)
    assert isinstance(model, Llama)
    assert model.head_dim == 64 // 4
    folder = copy_checkpoint(checkpoint("qwen3"), tmp_path / "qwen3", head_dim=None)
    with pytest.raises(CheckpointError, match=r"q_proj.weight has shape \[64, 64\].* asks for \[512, 64\]"):
        read_model(folder)


def test_the_dtype_is_the_checkpoints_own_unless_told_otherwise(checkpoint: MakeCheckpoint) -> None:
    spec = read_model_spec(checkpoint("llama"))
    auto = EngineConfig()
    for name, want in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float32)):
        assert dtype_for(replace(spec, dtype=name), auto) is want
        assert dtype_for(replace(spec, dtype=name), EngineConfig(dtype="bfloat16")) is torch.bfloat16
        assert dtype_for(replace(spec, dtype=name), EngineConfig(dtype="float32")) is torch.float32


def test_a_float16_checkpoint_computes_in_float32(checkpoint: MakeCheckpoint) -> None:
    bench = Bench(checkpoint("llama", dtype="float16"))
    assert bench.engine.decoder.dtype is torch.float32
    assert len(bench.generate([1, 2, 3], 3)) == 3


def test_a_file_that_vanished_since_it_was_checked_is_an_error_of_the_checkpoint(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    spec = read_model_spec(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors"):
        model_for(spec).build(Weights(spec, torch.float32, CPU))


def test_loaded_weights_outlive_their_files(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    bench = Bench(folder)
    want = bench.generate([1, 2, 3], 4)
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert bench.generate([1, 2, 3], 4) == want


def test_triton_on_a_cpu_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=r"engine\.attention=torch"):
        attention_for(EngineConfig(attention="triton"), FAST, CPU)
    assert isinstance(attention_for(EngineConfig(), FAST, CPU), TorchAttention)


@pytest.mark.parametrize("where", ["tokenizer.json", "special_tokens_map.json", "the vocabulary alone"])
def test_the_tokenizers_end_is_read_of_the_files_that_the_tokenizer_is_read_of(
    checkpoint: MakeCheckpoint, tmp_path: Path, where: str
) -> None:
    """Its own id counts where `added_tokens_decoder` has another."""
    folder = copy_checkpoint(checkpoint("llama"), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    added = [] if where == "the vocabulary alone" else [{"id": 9, "content": "<|im_end|>", "special": True}]
    named: dict[str, Any] = {} if where == "special_tokens_map.json" else {"eos_token": "<|im_end|>"}
    if where == "tokenizer.json":
        named["added_tokens_decoder"] = {"11": {"content": "<|im_end|>", "special": True}}
    _with_tokenizer(folder, added, **named)
    if where == "special_tokens_map.json":
        (folder / where).write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    if where == "the vocabulary alone":
        tree = json.loads((folder / "tokenizer.json").read_text())
        tree["model"]["vocab"] = {"a": 8, "<|im_end|>": 9}
        (folder / "tokenizer.json").write_text(json.dumps(tree))
    assert read_model_spec(folder).eos_token_ids == (5, 9)
