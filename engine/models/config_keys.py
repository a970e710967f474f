"""The keys of `config.json` that are without effect, and the keys whose other values aren't supported.

Every key is one of four kinds, for each architecture:

- *read*: asked for when the model is made. `contracts.checkpoint.json_fields.JsonFields` records these keys, so they
  needn't be listed.
- *without effect*: transformers' implementation of the architecture reads the key but computes the same at inference,
  or the key doesn't concern arithmetic (below).
- *refused*: transformers computes differently by the key, in a way that isn't supported here; all values but one are
  refused.
- *unknown*: transformers' implementation doesn't read the key either. Perhaps the weights were made for a program that
  does: the key is ignored, and named in a warning.

`tests/engine/test_config_keys.py` takes the keys that transformers reads from its source, and fails for a key that a
new version reads and that is none of these here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from twinpool.contracts.checkpoint.json_fields import JsonFields
from twinpool.contracts.checkpoint.rope_spec import unknown_rope_keys
from twinpool.contracts.errors import CheckpointError

log = logging.getLogger(__name__)
_OFF: tuple[object, ...] = (None, False, "", [], {})
"""Values with which an unknown key isn't worth a warning: absent, off or empty."""

_GENERAL = """
    architectures auto_map dtype model_type name_or_path torch_dtype transformers_version unsloth_version
    unsloth_fixed use_cache use_flash_attn use_parallel_embedding tokenizer_class prefix
    bos_token_id eos_token_id eod_token_id pad_token_id sep_token_id decoder_start_token_id
    forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens
    return_dict output_attentions output_hidden_states output_scores return_dict_in_generate torchscript
    chunk_size_feed_forward is_decoder is_encoder_decoder add_cross_attention cross_attention_hidden_size
    tie_encoder_decoder pruned_heads finetuning_task task_specific_params problem_type id2label label2id num_labels
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_beams num_beam_groups diversity_penalty num_return_sequences
    max_length min_length do_sample early_stopping remove_invalid_values exponential_decay_length_penalty
    attention_dropout hidden_dropout embd_pdrop resid_pdrop attn_pdrop dropout classifier_dropout
    residual_dropout embedding_dropout
    initializer_range initializer_factor rescale_prenorm_residual
    output_router_logits router_aux_loss_coef router_jitter_noise aux_loss_alpha seq_aux
    pretraining_tp ep_size num_logits_to_keep
    boi_token_index eoi_token_index image_token_index boi_token_id eoi_token_id eoi_token_index image_token_id
    boa_token_id eoa_token_id eoa_token_index audio_token_id video_token_id mm_tokens_per_image
    vision_soft_tokens_per_image vision_start_token_id vision_end_token_id vision_token_id vision_feature_layer
    multimodal_projector_bias projector_hidden_act projection_hidden_size projection_layer_norm_eps
    spatial_merge_size vision_config audio_config text_config llm_config language_model_only
"""
GENERAL = frozenset(_GENERAL.split())
"""Keys without effect for every architecture: names and versions, tokens that end or pad, defaults of generation
(`generation_config.json` has the ones that count), dropout and other numbers of training, and models of images and
sound around text."""


@dataclass(frozen=True, slots=True)
class ConfigKeys:
    """How one architecture treats keys that it doesn't read."""

    without_effect: Mapping[str, str] = field(default_factory=dict)
    """Keys without effect, each with the reason."""
    only: Mapping[str, object] = field(default_factory=dict)
    """The one supported value of each key; a `SameKey` names another key whose value it must have."""


@dataclass(frozen=True, slots=True)
class SameKey:
    """The value of another key."""

    key: str


CACHE = ("sliding_window", "attention_chunk_size", "layer_types", "kv_sharing_modes", "number_of_conv_states")
"""Keys by which transformers' cache decides what it keeps of a layer, even if the architecture doesn't read them: a
`sliding_window` in a Llama changes its answers. Where a key isn't read here, its value must mean that all is kept."""
_ALL_KEPT = (None, "full_attention")

_WINDOWS = {"sliding_window": "only with use_sliding_window, which is read"}
_LATENT = {
    "layer_types": "every layer attends alike",
    "head_dim": "overwritten by qk_rope_head_dim",
    "qk_head_dim": "the sum of its two parts",
    "num_local_experts": "another name of n_routed_experts",
    "num_experts": "another name of n_routed_experts",
    "num_nextn_predict_layers": "the tensors of the layer that predicts further tokens are looked for",
    "num_mtp_layers": "the tensors of the layer that predicts further tokens are looked for",
}
_NO_BIASES = {"mlp_bias": "not read: feed-forward layers have no biases"}
_ALL_HEADS = {"num_key_value_heads": SameKey("num_attention_heads")}
_EXPERTS = {"num_experts": "read as num_local_experts where that is given", "num_local_experts": "as num_experts"}
_MINIMAX_PARTS = ("full_attention", "linear_attention", "mlp")
_LFM2 = {
    "block_dim": "another name of hidden_size",
    "num_heads": "another name of num_attention_heads",
    "conv_dim": "hidden_size, which tensors are held to",
    "conv_dim_out": "hidden_size, which tensors are held to",
    "conv_use_xavier_init": "initial weights",
    "block_use_swiglu": "there is no other",
    "block_use_xavier_init": "initial weights",
    "block_norm_eps": "norm_eps is read",
    "block_mlp_init_scale": "initial weights",
    "block_out_init_scale": "initial weights",
    "use_pos_enc": "attention has rope",
    "theta": "rope_theta is read",
}
_MTP = {"mtp_num_hidden_layers": "the tensors of the layer that predicts further tokens are looked for"}
_COHERE = """
    layer_switch order_of_interleaved_layers position_embedding_type rotary_pct use_embedding_sharing
    use_gated_activation use_parallel_block cache_implementation
"""
_PLAIN = """
    Apertus Arcee Cohere Cwm Ernie45 Gemma1 Gemma2 Glm Glm4 Granite HunYuanDense HyperCLOVAX InternLM3 Ministral Olmo2
    Olmo3 Phi SeedOss SmolLM3 Starcoder2
"""

KEYS: Mapping[str, ConfigKeys] = {
    "Llama": ConfigKeys(),
    "Qwen2": ConfigKeys(_WINDOWS),
    "Qwen2Moe": ConfigKeys(_WINDOWS | _EXPERTS),
    "Qwen3": ConfigKeys(_WINDOWS),
    "Qwen3Moe": ConfigKeys(_WINDOWS | _EXPERTS | {"max_window_layers": "its window is of all layers or of none"}),
    "Mistral": ConfigKeys(),
    "Qwen2VL": ConfigKeys(_WINDOWS),
    "Qwen3VL": ConfigKeys(_WINDOWS),
    "Qwen3VLMoe": ConfigKeys(_EXPERTS),
    "Mixtral": ConfigKeys(_EXPERTS),
    "MiniMaxM2": ConfigKeys(
        _EXPERTS
        | {
            "attn_type_list": "every layer attends alike",
            "qk_norm_type": "norms of all queries together",
            "use_mtp": "layers that predict further tokens are left unused",
            "num_mtp_modules": "layers that predict further tokens are left unused",
            "mtp_transformer_layers": "layers that predict further tokens are left unused",
            "mlp_intermediate_size": "no layer is without experts",
            "shared_moe_mode": "only with shared_intermediate_size",
            **{f"layernorm_{part}_beta": "of models before this one" for part in _MINIMAX_PARTS},
        },
        {"use_qk_norm": True, "use_routing_bias": True, "scoring_func": "sigmoid", "shared_intermediate_size": 0},
    ),
    "Olmoe": ConfigKeys(_EXPERTS, {"clip_qkv": None}),
    "Glm4Moe": ConfigKeys(
        {key: _LATENT[key] for key in ("num_local_experts", "num_nextn_predict_layers", "num_mtp_layers")}
    ),
    "Ernie45Moe": ConfigKeys(
        {
            "moe_capacity": "training",
            "moe_group": "training",
            "moe_gate": "one way to choose",
            "moe_use_aux_free": "a correction is always there",
            "num_experts": "another name of moe_num_experts",
            "num_experts_per_tok": "another name of moe_k",
        }
    ),
    "HunYuanMoe": ConfigKeys(
        {
            "moe_intermediate_size": "read as intermediate_size, which tensors are held to",
            "num_shared_expert": "one, which tensors are held to",
            "use_mixed_mlp_moe": "every layer has a shared expert",
            "num_local_experts": "another name of num_experts",
            "eod_token_id": "a token that ends",
        }
    ),
    "GraniteMoe": ConfigKeys(),
    "Lfm2": ConfigKeys(_LFM2 | {"intermediate_size": "only without block_ff_dim, which is read"}),
    "Lfm2Moe": ConfigKeys(_LFM2),
    "GraniteMoeHybrid": ConfigKeys({"mamba_chunk_size": "how a sum is divided, not what it comes to"}),
    "DeepseekV2": ConfigKeys(_LATENT, _ALL_HEADS | {"norm_topk_prob": False, "mlp_bias": False}),
    "Glm4MoeLite": ConfigKeys(_LATENT | _NO_BIASES, _ALL_HEADS),
    "DeepseekV3": ConfigKeys(_LATENT | _NO_BIASES, _ALL_HEADS),
    "DeepseekV32": ConfigKeys(_LATENT | _NO_BIASES, _ALL_HEADS),
    "GlmMoeDsa": ConfigKeys(_LATENT | _NO_BIASES, _ALL_HEADS),
    **{name: ConfigKeys() for name in _PLAIN.split()},
    "Phi3": ConfigKeys({"original_max_position_embeddings": "only with longrope, which is read"}),
    "Exaone4": ConfigKeys({"sliding_window_pattern": "only without layer_types, which is read"}),
    "Ministral3": ConfigKeys(
        {
            "llama_4_scaling_beta": "read as a part of rope_parameters",
            "max_position_embeddings": "read as the context, whatever rope_parameters says beside it",
        }
    ),
    "Cohere2": ConfigKeys(dict.fromkeys(_COHERE.split(), "says what the architecture always does")),
    "Gemma3": ConfigKeys(),
    "Gemma4": ConfigKeys(
        {
            "num_experts": "only with enable_moe_block, which is read",
            "moe_intermediate_size": "only with enable_moe_block, which is read",
        }
    ),
    "GptOss": ConfigKeys({"hidden_act": "its experts have an activation of their own"}),
    "Qwen3Next": ConfigKeys(_EXPERTS | _MTP),
    "Qwen35": ConfigKeys(_EXPERTS | _MTP),
    "FalconH1": ConfigKeys(
        {
            "mamba_chunk_size": "how a sum is divided, not what it comes to",
            "mamba_expand": "only without mamba_d_ssm, which is read",
        }
    ),
    "NemotronH": ConfigKeys(
        {
            "chunk_size": "how a sum is divided, not what it comes to",
            "num_local_experts": "another name of n_routed_experts",
            "time_step_max": "initial weights",
            "time_step_floor": "initial weights",
            "time_step_limit": "not read: time_step_min is",
            "use_mamba_kernels": "which kernels compute it",
            "mamba_ssm_cache_dtype": "of other programs' kernels",
            "expand": "not read: mamba_num_heads and mamba_head_dim are",
            "n_shared_experts": "not read: the width of shared experts is",
            "moe_shared_expert_overlap": "the order of work",
            "num_nextn_predict_layers": "layers that predict further tokens are left unused",
            "mtp_layers_block_type": "layers that predict further tokens are left unused",
        },
        {"mamba_hidden_act": "silu"},
    ),
}
"""The keys of each class in `engine/models`, by its name; a class that isn't here reads all keys that matter."""


def check_keys(model: str, config: JsonFields) -> tuple[str, ...]:
    """Return the keys that neither this architecture nor transformers' implementation of it knows, as ``key=value``.

    Call it after the model was made: it goes by the keys that were read then. Raises `CheckpointError` for a value that
    would change the arithmetic and isn't supported.
    """
    keys = KEYS.get(model, ConfigKeys())
    if config.values.get("is_causal") is False:
        raise config.refuse("is_causal false: a model that sees what follows can't generate, nor embed here")
    for key, only in keys.only.items():
        allowed = config.values.get(only.key) if isinstance(only, SameKey) else only
        if key in config and config.values[key] != allowed:
            raise CheckpointError(f"{config.path}: {key} {config.values[key]!r} is not supported; only {allowed!r} is")
    known = config.read | GENERAL | keys.without_effect.keys() | keys.only.keys()
    for key in (key for key in CACHE if key not in known):
        value = config.values.get(key)
        if any(one not in _ALL_KEPT for one in (value if isinstance(value, list) else [value])):
            text = f"{key} {value!r:.60} is not supported: {model} keeps and attends to every token"
            raise CheckpointError(f"{config.path}: {text}")
    known |= set(CACHE)
    given = {key: value for key, value in config.values.items() if key not in known and not key.startswith("_")}
    rope = unknown_rope_keys(config)
    given |= {key: value for key, value in rope.items() if key.rpartition(".")[2] not in keys.without_effect}
    return tuple(f"{key}={value!r:.60}" for key, value in sorted(given.items()) if value not in _OFF)


def warn_of(unknown: tuple[str, ...], architecture: str, config: JsonFields) -> None:
    """Log unknown keys in one line for the operator; nothing where there are none."""
    if unknown:
        log.warning(
            "%s: %s doesn't know these keys, and they are left out (if the weights were made with them, answers will "
            "be wrong): %s",
            config.path,
            architecture,
            ", ".join(unknown),
        )
