"""A checkpoint that lacks a tensor, or has one of another shape, is refused by its name: for every architecture, for
every kind of tensor that it reads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.model_families import EVERY, FAMILIES
from twinpool.contracts.checkpoint.model_spec import ModelSpec, read_model_spec
from twinpool.contracts.errors import CheckpointError
from twinpool.engine.models.model_base import ShapesAlone
from twinpool.engine.models.registry import ARCHITECTURES, model_for

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48,
}
PUBLISHED: dict[str, Any] = {"published": True}
CHECKPOINTS: list[tuple[str, str, dict[str, Any]]] = [
    ("FalconH1ForCausalLM", "falcon_h1", {"mamba_proj_bias": True, "projectors_bias": True}),
    ("Gemma3ForCausalLM", "gemma3", PUBLISHED | {"alone": True, "attention_bias": True}),
    ("Gemma3ForConditionalGeneration", "gemma3", PUBLISHED),
    ("Gemma4ForCausalLM", "gemma4", {"enable_moe_block": True}),
    ("Gemma4ForConditionalGeneration", "gemma4", PUBLISHED),
    ("GptOssForCausalLM", "gpt_oss", {}),
    ("GptOssForCausalLM", "gpt_oss", PUBLISHED | {"packed": True, "num_hidden_layers": 2}),
    ("LlamaForCausalLM", "llama", {"bias": True}),
    ("MistralForCausalLM", "mistral", PUBLISHED),
    ("Mistral3ForConditionalGeneration", "mistral", {}),
    ("NemotronHForCausalLM", "nemotron_h", {"use_bias": True, "mlp_bias": True}),
    ("Qwen2ForCausalLM", "qwen2", PUBLISHED),
    ("Qwen2VLForConditionalGeneration", "qwen2", PUBLISHED),
    ("Qwen2_5_VLForConditionalGeneration", "qwen2", {}),
    ("Qwen3ForCausalLM", "qwen3", {}),
    ("Qwen3VLForConditionalGeneration", "qwen3", {}),
    ("MixtralForCausalLM", "mixtral", PUBLISHED),
    ("MixtralForCausalLM", "mixtral", {"fused": True}),
    ("Qwen2MoeForCausalLM", "qwen2_moe", PUBLISHED),
    ("OlmoeForCausalLM", "olmoe", PUBLISHED),
    ("Glm4MoeForCausalLM", "glm4_moe", PUBLISHED),
    ("MiniMaxM2ForCausalLM", "minimax_m2", PUBLISHED),
    ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", {"use_bias": True, "tie_word_embeddings": False}),
    ("HunYuanMoEV1ForCausalLM", "hunyuan_moe", {}),
    ("GraniteMoeForCausalLM", "granite_moe", PUBLISHED),
    ("GraniteMoeSharedForCausalLM", "granite_moe_shared", {}),
    ("GraniteMoeHybridForCausalLM", "granite_hybrid", PUBLISHED | {"mamba_proj_bias": True}),
    ("Lfm2ForCausalLM", "lfm2", PUBLISHED | {"conv_bias": True, "tie_word_embeddings": False}),
    ("Lfm2MoeForCausalLM", "lfm2_moe", {}),
    ("KimiK25ForConditionalGeneration", "deepseek_v3", PUBLISHED),
    ("Kimi_K25ForConditionalGeneration", "deepseek_v3", {}),
    ("Qwen3VLMoeForConditionalGeneration", "qwen3_moe", PUBLISHED),
    ("DeepseekV2ForCausalLM", "deepseek_v2", {}),
    ("Glm4MoeLiteForCausalLM", "glm4_moe_lite", PUBLISHED),
    ("DeepseekV3ForCausalLM", "deepseek_v3", PUBLISHED),
    ("DeepseekV3ForCausalLM", "deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
    ("DeepseekV32ForCausalLM", "deepseek_v32", PUBLISHED),
    ("GlmMoeDsaForCausalLM", "glm5", PUBLISHED),
    ("Qwen3MoeForCausalLM", "qwen3_moe", PUBLISHED),
    ("Qwen3MoeForCausalLM", "qwen3_moe", {"fused": True}),
    ("Qwen3NextForCausalLM", "qwen3_next", PUBLISHED),
    ("Qwen3_5ForCausalLM", "qwen3_5", {}),
    ("Qwen3_5ForConditionalGeneration", "qwen3_5", PUBLISHED),
    ("Qwen3_5MoeForCausalLM", "qwen3_5", EXPERTS),
    ("Qwen3_5MoeForConditionalGeneration", "qwen3_5", EXPERTS | PUBLISHED),
    ("ApertusForCausalLM", "apertus", {}),
    ("AquilaForCausalLM", "llama", {}),
    ("ArceeForCausalLM", "arcee", {"mlp_bias": True}),
    ("CohereForCausalLM", "cohere", {"attention_bias": True, "tie_word_embeddings": True}),
    ("Cohere2ForCausalLM", "cohere2", {}),
    ("CwmForCausalLM", "cwm", {}),
    ("Ernie4_5ForCausalLM", "ernie4_5", {}),
    ("Exaone4ForCausalLM", "exaone4", {}),
    ("GemmaForCausalLM", "gemma", {}),
    ("Gemma2ForCausalLM", "gemma2", {"attention_bias": True}),
    ("GlmForCausalLM", "glm", {}),
    ("Glm4ForCausalLM", "glm4", {}),
    ("GraniteForCausalLM", "granite", {"mlp_bias": True}),
    ("HunYuanDenseV1ForCausalLM", "hunyuan", {}),
    ("HyperCLOVAXForCausalLM", "hyperclovax", {}),
    ("InternLM3ForCausalLM", "llama", {}),
    ("MinistralForCausalLM", "ministral", {}),
    ("Ministral3ForCausalLM", "ministral3", {}),
    ("Olmo2ForCausalLM", "olmo2", {"attention_bias": True}),
    ("Olmo3ForCausalLM", "olmo3", {}),
    ("PhiForCausalLM", "phi", {}),
    ("Phi3ForCausalLM", "phi3", {}),
    ("SeedOssForCausalLM", "seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    ("SmolLM3ForCausalLM", "smollm3", {}),
    ("Starcoder2ForCausalLM", "starcoder2", {}),
]
UNUSED = re.compile(
    r"mtp\.|vision_tower\.|model\.visual\.|model\.layers\.[34]\.(eh_proj|enorm|hnorm|shared_head|embed_tokens)"
)
"""Of parts that nobody asks here; a whole layer past the last is recognised by its number."""


def spec_of(tmp_path: Path, architecture: str, family: str, options: dict[str, Any]) -> ModelSpec:
    folder = EVERY[family](tmp_path / "model", **options)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    # The makers know one name for dense layers and experts, and transformers not all of Llama's kin.
    if architecture.endswith("ForConditionalGeneration") or architecture.startswith(("Aquila", "InternLM3")):
        path.write_text(json.dumps(config | {"architectures": [architecture]}))
    spec = read_model_spec(folder)
    assert spec.architecture == architecture
    return spec


def ends_of_each_kind(spec: ModelSpec) -> list[tuple[str, str]]:
    """The first and the last tensor of each kind, whose names differ in numbers alone, that the model has a use for."""
    kinds: dict[str, list[str]] = {}
    for name in sorted(spec.headers, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
        layer = re.search(r"layers\.(\d+)\.", name)
        if not UNUSED.match(name) and (layer is None or int(layer[1]) < spec.layers):
            kinds.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    return [(names[0], names[-1]) for names in kinds.values()]


def refusal(spec: ModelSpec) -> str:
    with pytest.raises(CheckpointError) as error:
        model_for(spec)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture(params=CHECKPOINTS, ids=lambda case: "-".join([case[0], *case[2]]))
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> ModelSpec:
    return spec_of(tmp_path, *request.param)


def test_every_architecture_is_here() -> None:
    assert {architecture for architecture, *_ in CHECKPOINTS} == set(ARCHITECTURES)


@pytest.mark.slow
def test_what_is_missing_or_misshapen_is_named_whatever_it_is(spec: ModelSpec) -> None:
    model_for(spec)
    ends = ends_of_each_kind(spec)
    assert len(ends) > 8
    for number, (first, last) in enumerate(ends):
        assert f"tensor {last} is missing" in refusal(without(spec, last))
        header = spec.headers[first]
        shapes = [(*header.shape[:-1], sum(header.shape[-1:]) + 1), (*header.shape, 1), header.shape[:-1]]
        shape = shapes[number % len(shapes)] if header.shape else (1,)
        said = refusal(replace(spec, headers={**spec.headers, first: replace(header, shape=shape)}))
        assert f"tensor {first} has shape {list(shape)}" in said
        assert str(list(header.shape)) in said, "it says which one it should have"


def without(spec: ModelSpec, name: str) -> ModelSpec:
    return replace(spec, headers={key: header for key, header in spec.headers.items() if key != name})


@pytest.mark.slow
def test_a_model_is_checked_and_weighed_without_torchs_compiler(tmp_path: Path) -> None:
    """Which takes a processor more than a second to load, in every `serve` and every worker."""
    kinds = ("llama", "gpt_oss", "gemma4", "deepseek_v32", "falcon_h1", "qwen3_next", "lfm2")
    folders = [str(FAMILIES[kind](tmp_path / kind)) for kind in kinds]
    code = (
        "import sys; from pathlib import Path; from twinpool.engine.models.registry import read_model\n"
        "from twinpool.cluster.serve.preflight import weight_bytes\n"
        "from twinpool.contracts.config.load_config import config_from_dict\n"
        "for folder in sys.argv[1:]:\n"
        "    weight_bytes(read_model(Path(folder)).spec, config_from_dict({}))\n"
        "    assert 'torch._dynamo' not in sys.modules, folder"
    )
    ended = subprocess.run([sys.executable, "-c", code, *folders], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_shapes_and_dtypes_without_numbers_are_torchs() -> None:
    a_nk, b_nk = (torch.empty(rows, 4, dtype=torch.bfloat16, device="meta") for rows in (2, 3))
    whole, wide = torch.empty(3, dtype=torch.int64, device="meta"), torch.empty(5, 1, 4, device="meta")
    computed: list[Callable[[], Tensor]] = [
        lambda: torch.cat([a_nk, b_nk]), lambda: torch.cat((a_nk, a_nk), 1), a_nk.exp, lambda: -a_nk,
        lambda: a_nk + 1.0, lambda: a_nk * 2.0, lambda: whole + 1.0, lambda: a_nk * wide,
    ]  # fmt: skip
    for made in computed:
        want = made()
        with ShapesAlone():
            got = made()
        assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)
