"""The model registry: from the architecture in `config.json` to the class that implements it."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from twinpool.contracts.checkpoint.model_spec import CLASSIFIER, ModelSpec, read_model_spec
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import CheckpointError, ConfigError
from twinpool.engine.models.config_keys import check_keys, warn_of
from twinpool.engine.models.model_base import Model
from twinpool.engine.tensors.weight_loader import Weights

ARCHITECTURES = {
    "Ernie4_5_MoeForCausalLM": "mixtures.Ernie45Moe",
    "FalconH1ForCausalLM": "mamba_models.FalconH1",
    "Gemma3ForCausalLM": "gemma.Gemma3",
    "Gemma3ForConditionalGeneration": "gemma.Gemma3",
    "Gemma4ForCausalLM": "gemma.Gemma4",
    "Gemma4ForConditionalGeneration": "gemma.Gemma4",
    "Glm4MoeForCausalLM": "mixtures.Glm4Moe",
    "Glm4MoeLiteForCausalLM": "deepseek.Glm4MoeLite",
    "GptOssForCausalLM": "mixtures.GptOss",
    "GraniteMoeForCausalLM": "mixtures.GraniteMoe",
    "GraniteMoeHybridForCausalLM": "mamba_models.GraniteMoeHybrid",
    "GraniteMoeSharedForCausalLM": "mixtures.GraniteMoe",
    "HunYuanMoEV1ForCausalLM": "mixtures.HunYuanMoe",
    "KimiK25ForConditionalGeneration": "deepseek.DeepseekV3",
    "Kimi_K25ForConditionalGeneration": "deepseek.DeepseekV3",
    "Lfm2ForCausalLM": "mamba_models.Lfm2",
    "Lfm2MoeForCausalLM": "mamba_models.Lfm2Moe",
    "LlamaForCausalLM": "llama.Llama",
    "MiniMaxM2ForCausalLM": "mixtures.MiniMaxM2",
    "Mistral3ForConditionalGeneration": "llama.Mistral",
    "MistralForCausalLM": "llama.Mistral",
    "MixtralForCausalLM": "mixtures.Mixtral",
    "NemotronHForCausalLM": "mamba_models.NemotronH",
    "OlmoeForCausalLM": "mixtures.Olmoe",
    "Qwen2ForCausalLM": "qwen.Qwen2",
    "Qwen2MoeForCausalLM": "qwen.Qwen2Moe",
    "Qwen2VLForConditionalGeneration": "qwen.Qwen2VL",
    "Qwen2_5_VLForConditionalGeneration": "qwen.Qwen2VL",
    "Qwen3ForCausalLM": "qwen.Qwen3",
    "Qwen3VLForConditionalGeneration": "qwen.Qwen3VL",
    "DeepseekV2ForCausalLM": "deepseek.DeepseekV2",
    "DeepseekV3ForCausalLM": "deepseek.DeepseekV3",
    "DeepseekV32ForCausalLM": "deepseek.DeepseekV32",
    "GlmMoeDsaForCausalLM": "deepseek.GlmMoeDsa",
    "Qwen3MoeForCausalLM": "qwen.Qwen3Moe",
    "Qwen3VLMoeForConditionalGeneration": "qwen.Qwen3VLMoe",
    "Qwen3NextForCausalLM": "qwen.Qwen3Next",
    "Qwen3_5ForCausalLM": "qwen.Qwen35",
    "Qwen3_5ForConditionalGeneration": "qwen.Qwen35",
    "Qwen3_5MoeForCausalLM": "qwen.Qwen35",
    "Qwen3_5MoeForConditionalGeneration": "qwen.Qwen35",
    "AquilaForCausalLM": "llama.Llama",
    "InternLM3ForCausalLM": "llama_kin.InternLM3",
    "ApertusForCausalLM": "llama_kin.Apertus",
    "ArceeForCausalLM": "llama_kin.Arcee",
    "CwmForCausalLM": "llama_kin.Cwm",
    "Ernie4_5ForCausalLM": "llama_kin.Ernie45",
    "Exaone4ForCausalLM": "llama_kin.Exaone4",
    "Gemma2ForCausalLM": "gemma.Gemma2",
    "GemmaForCausalLM": "gemma.Gemma1",
    "Glm4ForCausalLM": "llama_kin.Glm4",
    "GlmForCausalLM": "llama_kin.Glm",
    "GraniteForCausalLM": "llama_kin.Granite",
    "HunYuanDenseV1ForCausalLM": "llama_kin.HunYuanDense",
    "HyperCLOVAXForCausalLM": "llama_kin.HyperCLOVAX",
    "Ministral3ForCausalLM": "llama_kin.Ministral3",
    "MinistralForCausalLM": "llama_kin.Ministral",
    "Olmo2ForCausalLM": "llama_kin.Olmo2",
    "Olmo3ForCausalLM": "llama_kin.Olmo3",
    "Phi3ForCausalLM": "llama_kin.Phi3",
    "SeedOssForCausalLM": "llama_kin.SeedOss",
    "SmolLM3ForCausalLM": "llama_kin.SmolLM3",
    "CohereForCausalLM": "llama_kin.Cohere",
    "Cohere2ForCausalLM": "llama_kin.Cohere2",
    "PhiForCausalLM": "llama_kin.Phi",
    "Starcoder2ForCausalLM": "llama_kin.Starcoder2",
}
"""The module and class in `engine.models` that implement each architecture, by its name in `config.json`."""
OTHERS = "others may be computed with engine.models=transformers"
"""What an error about an architecture that isn't listed says further."""
DEFAULTS = EngineConfig()
_OTHER_TEXTS = {("Mistral3ForConditionalGeneration", "ministral3"): "Ministral3ForCausalLM"}
"""The architecture of the text of a model of more than text, where that isn't the one above, by the text's type."""
_WARNED: set[tuple[Path, tuple[str, ...]]] = set()
"""Warnings that were logged already, since a process reads a checkpoint several times."""


def without_classes(architecture: str) -> str:
    """The architecture that generates text with the layers of one that tells classes; of others, themselves."""
    return re.sub(f"{CLASSIFIER}$", "ForCausalLM", architecture)


def model_for(spec: ModelSpec, config: EngineConfig = DEFAULTS) -> Model:
    """Make the model of a checkpoint, and check its numbers and the names and shapes of its tensors.

    Raises `CheckpointError` with one line of text for an architecture that is not supported, for invalid numbers, and
    for a tensor that is missing or of the wrong shape (naming it and both shapes); `ConfigError` for what
    `engine.models` asks for and can't be had.
    """
    model = unchecked_model(spec, config)
    model.build_dry(Weights.dry(spec))
    if config.models == "transformers":
        return model
    unknown = check_keys(type(model).__name__, spec.config)
    if (spec.config.path, unknown) not in _WARNED:
        _WARNED.add((spec.config.path, unknown))
        warn_of(unknown, spec.architecture, spec.config)
    return model


def unchecked_model(spec: ModelSpec, config: EngineConfig = DEFAULTS) -> Model:
    """Make the model of a checkpoint by its numbers alone, whatever tensors are there. Raises `CheckpointError`."""
    if config.models == "transformers":
        from twinpool.engine.models.transformers_models import TransformersModel

        if spec.pooling.labels:
            raise ConfigError("engine.models=transformers computes no classes: leave it as it is without it")
        return TransformersModel(spec, config)
    of_text = spec.architecture, str(spec.config.peek("model_type"))
    entry = ARCHITECTURES.get(_OTHER_TEXTS.get(of_text, without_classes(spec.architecture)))
    if entry is None:
        raise CheckpointError(
            f"{spec.config.path}: architecture {spec.architecture} is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}; {OTHERS}"
        )
    file, _, name = entry.partition(".")
    model: Model = getattr(import_module(f"twinpool.engine.models.{file}"), name)(spec)
    return model


def read_model(folder: Path, context: int = 0, draft_model: str = "", config: EngineConfig = DEFAULTS) -> Model:
    """Read and check a checkpoint folder without loading a tensor. Raises `CheckpointError`; `ConfigError` for a
    `context` (`engine.context`), or an `engine.draft_model`, that it doesn't have."""
    return model_for(read_model_spec(folder, context, draft_model), config)
