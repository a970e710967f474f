"""Small checkpoints of models that see, with random weights, and what transformers answers with them: the oracle gets
the very messages that a client sends, pictures as data URLs in them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from transformers.image_utils import load_image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.support.checkpoints import VOCAB, write_tokenizer
from tests.support.family_checkpoint import COMMON
from tests.support.family_hybrid import DELTA, respread

TEXT = COMMON | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 64,
    "patch_size": 4,
    "hidden_act": "silu",
}
UNIT = 8
"""Pixels of the side of a position."""
MARKS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
PARTS_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type in ['image', 'image_url'] %}MARK{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A chat template, with the mark of a picture in place of MARK."""
COLOURS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.3, 0.2, 0.25], "rescale_factor": 1 / 255}
TEMPLATE = PARTS_TEMPLATE.replace("MARK", MARKS[0])
GEMMA_MARKS = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
GEMMA_TOKENS, GEMMA_SIDE = 16, 32
"""Positions of each picture, and pixels of its side."""
GEMMA4_MARKS = ("<|image>", "<image|>", "<|image|>")
QWEN_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_PIXELS = {"shortest_edge": 256, "longest_edge": 4096}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
QWEN_TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
}


def write_mistral3(folder: Path, *, longest: int = 64, seed: int = 5, dtype: str = "float32") -> Path:
    """Write a Mistral 3 with a tower of two layers, whose pictures have `longest` pixels a side and 8 a position."""
    config = transformers.Mistral3Config(
        text_config=TEXT
        | {
            "model_type": "mistral",
            "head_dim": 16,
            "sliding_window": None,
            "vocab_size": VOCAB + len(MARKS),
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        vision_config=PIXTRAL,
        image_token_index=VOCAB,
        tie_word_embeddings=False,
        eos_token_id=0,
        initializer_range=0.3,
    )
    _write_model(folder, transformers.Mistral3ForConditionalGeneration, config, seed, dtype)
    _write_text(folder, MARKS, TEMPLATE)
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": "PixtralProcessor", "patch_size": 4, "spatial_merge_size": 2})
    )
    (folder / "preprocessor_config.json").write_text(
        json.dumps({
            "image_processor_type": "PixtralImageProcessor", "patch_size": {"height": 4, "width": 4}, "resample": 3,
            "size": {"longest_edge": longest}, "do_convert_rgb": True, **COLOURS,
        })
    )  # fmt: skip
    return folder


def write_gemma3(folder: Path, *, seed: int = 5, dtype: str = "float32") -> Path:
    """Write a Gemma 3 whose pictures have 32 pixels a side and 16 positions, with windows of 40 positions."""
    config = transformers.Gemma3Config(
        text_config=TEXT
        | {
            "head_dim": 16, "sliding_window": 40, "query_pre_attn_scalar": 16, "vocab_size": VOCAB + len(GEMMA_MARKS),
            "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
        },
        vision_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": GEMMA_SIDE, "patch_size": 4, "vision_use_head": False,
        },
        mm_tokens_per_image=GEMMA_TOKENS,
        boi_token_index=VOCAB,
        eoi_token_index=VOCAB + 1,
        image_token_index=VOCAB + 2,
        eos_token_id=0,
        initializer_range=0.3,
    )  # fmt: skip
    _write_model(folder, transformers.Gemma3ForConditionalGeneration, config, seed, dtype)
    names = dict(zip(("boi_token", "eoi_token", "image_token"), GEMMA_MARKS, strict=True))
    _write_text(folder, GEMMA_MARKS, PARTS_TEMPLATE.replace("MARK", GEMMA_MARKS[0]), **names)
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": "Gemma3Processor", "image_seq_length": GEMMA_TOKENS})
    )
    (folder / "preprocessor_config.json").write_text(
        json.dumps({
            "image_processor_type": "Gemma3ImageProcessor", "do_pan_and_scan": None, "resample": 2,
            "size": {"height": GEMMA_SIDE, "width": GEMMA_SIDE}, **COLOURS,
        })
    )  # fmt: skip
    return folder


def write_gemma4(
    folder: Path, *, small: bool = False, ahead: bool = False, seed: int = 5, dtype: str = "float32"
) -> Path:
    """Write a Gemma 4 whose pictures have 12 pixels a side of a position, and up to 70 positions. `small`: with inputs
    by layer, shared keys and bounds in its tower, as the small ones; `ahead`: with positions of a picture that see each
    other in layers with a window, as the large ones."""
    config = transformers.Gemma4Config(
        text_config=TEXT
        | {
            "head_dim": 16, "sliding_window": 80, "vocab_size": VOCAB + len(GEMMA4_MARKS), "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": int(small),
            "pad_token_id": 5, "global_head_dim": 32, "hidden_size_per_layer_input": 16 * small,
            "attention_k_eq_v": not small, "vocab_size_per_layer_input": VOCAB + len(GEMMA4_MARKS),
            "use_bidirectional_attention": "vision" if ahead else None,
        },
        vision_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 256,
            "use_clipped_linears": small, "standardize": True,
        },
        audio_config=None,
        boi_token_id=VOCAB,
        eoi_token_id=VOCAB + 1,
        image_token_id=VOCAB + 2,
        audio_token_id=None,
        video_token_id=None,
        eos_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    _write_model(folder, transformers.Gemma4ForConditionalGeneration, config, seed, dtype)
    names = dict(zip(("boi_token", "eoi_token", "image_token"), GEMMA4_MARKS, strict=True))
    _write_text(folder, GEMMA4_MARKS, PARTS_TEMPLATE.replace("MARK", GEMMA4_MARKS[2]), **names)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({
            "image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "pooling_kernel_size": 3,
            "max_soft_tokens": 70, "resample": 3, "do_normalize": False, "rescale_factor": 1 / 255,
        })
    )  # fmt: skip
    return folder


def write_qwen25_vl(folder: Path, *, seed: int = 5, dtype: str = "float32") -> Path:
    """Write a Qwen2.5-VL with 8 pixels a side of a position, and windows of 2 by 2 positions in its tower."""
    config = transformers.Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": MROPE, "vocab_size": VOCAB + len(QWEN_MARKS)},
        vision_config=QWEN_TOWER | {"window_size": 16, "fullatt_block_indexes": [1]},
        **_QWEN_IDS,
    )
    _write_model(folder, transformers.Qwen2_5_VLForConditionalGeneration, config, seed, dtype)
    _write_qwens(folder, {"min_pixels": QWEN_PIXELS["shortest_edge"], "max_pixels": QWEN_PIXELS["longest_edge"]})
    return folder


def write_qwen2_vl(folder: Path, *, seed: int = 5, dtype: str = "float32") -> Path:
    """Write a Qwen2-VL with 8 pixels a side of a position."""
    tower = {"depth": 3, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 2, "patch_size": 4}
    config = transformers.Qwen2VLConfig(
        text_config=TEXT | {"rope_parameters": MROPE, "vocab_size": VOCAB + len(QWEN_MARKS)},
        vision_config=tower,
        **_QWEN_IDS,
    )
    _write_model(folder, transformers.Qwen2VLForConditionalGeneration, config, seed, dtype)
    _write_qwens(folder, {"min_pixels": QWEN_PIXELS["shortest_edge"], "max_pixels": QWEN_PIXELS["longest_edge"]})
    return folder


def write_qwen3_vl(folder: Path, *, experts: bool = False, seed: int = 5, dtype: str = "float32") -> Path:
    """Write a Qwen3-VL with 8 pixels a side of a position, of whose tower two layers are shown to the text."""
    rope = {"rope_parameters": MROPE | {"mrope_interleaved": True}}
    text = TEXT | rope | {"head_dim": 16, "vocab_size": VOCAB + len(QWEN_MARKS), "num_hidden_layers": 3}
    name = "Qwen3VLMoe" if experts else "Qwen3VL"
    if experts:
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    config = getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config=QWEN_TOWER | {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]},
        **_QWEN_IDS,
    )
    _write_model(folder, getattr(transformers, f"{name}ForConditionalGeneration"), config, seed, dtype)
    _write_qwens(folder, {"size": QWEN_PIXELS})
    return folder


def write_qwen35(folder: Path, *, experts: bool = False, seed: int = 5, dtype: str = "float32") -> Path:
    """Write a Qwen3.5 with 8 pixels a side of a position, and recurrent layers whose states last."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]}
    text = TEXT | DELTA | {"rope_parameters": rope, "vocab_size": VOCAB + len(QWEN_MARKS)}
    text |= {"layer_types": ["linear_attention", "full_attention"] * 2}  # Each half has one of each kind.
    name = "Qwen3_5Moe" if experts else "Qwen3_5"
    if experts:
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
        text |= {"shared_expert_intermediate_size": 48}
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=QWEN_TOWER | {"num_position_embeddings": 25}, **_QWEN_IDS
    )
    _write_model(folder, getattr(transformers, f"{name}ForConditionalGeneration"), config, seed, dtype)
    respread(folder, seed)
    _write_qwens(folder, {"size": QWEN_PIXELS})
    return folder


_QWEN_IDS = {
    "vision_start_token_id": VOCAB,
    "vision_end_token_id": VOCAB + 1,
    "image_token_id": VOCAB + 2,
    "video_token_id": VOCAB + 3,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}
SEEN = {
    "mistral3": "Mistral3ForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "qwen2-vl": "Qwen2VLForConditionalGeneration",
    "qwen2.5-vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3-vl": "Qwen3VLForConditionalGeneration",
    "qwen3-vl with experts": "Qwen3VLMoeForConditionalGeneration",
    "qwen3.5": "Qwen3_5ForConditionalGeneration",
    "qwen3.5 with experts": "Qwen3_5MoeForConditionalGeneration",
}
"""The architectures, by the names that tests have for them."""
WRITERS: dict[str, Callable[..., Path]] = {
    "mistral3": write_mistral3,
    "gemma3": write_gemma3,
    "gemma4": write_gemma4,
    "qwen2-vl": write_qwen2_vl,
    "qwen2.5-vl": write_qwen25_vl,
    "qwen3-vl": write_qwen3_vl,
    "qwen3.5": write_qwen35,
}


def _write_model(folder: Path, kind: Any, config: Any, seed: int, dtype: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config)
        for key, tensor in model.named_parameters():
            if key.endswith(("norm.weight", "norm1.weight", "norm2.weight", "ln_pre.weight", "ln_q.weight")):
                tensor.data.uniform_(0.5, 1.5)
            else:
                tensor.data.normal_(0.0, 0.6 if "input_projection" in key else 0.2)
        # Of Gemma 4: bounds that cut, and what pooled patches are brought to.
        for key, tensor in model.named_buffers():
            if key.endswith(("_min", "_max", "std_bias", "std_scale")):
                tensor.data.uniform_(0.5, 1.5).mul_(-1.0 if key.endswith("_min") else 1.0)
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def _write_text(folder: Path, marks: Sequence[str], template: str, **names: str) -> None:
    """A tokenizer of the tokens below `VOCAB`, and `marks` above; what it says of itself further."""
    write_tokenizer(folder, VOCAB, chat=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= VOCAB
    for number in range(tokenizer.get_vocab_size(), VOCAB):
        tokenizer.add_tokens([AddedToken(f"<unused {number}>", special=False)])
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": template, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))


def _write_qwens(folder: Path, sizes: Mapping[str, Any]) -> None:
    start, end, pad, _ = QWEN_MARKS
    _write_text(folder, QWEN_MARKS, PARTS_TEMPLATE.replace("MARK", start + pad + end), image_token=pad)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({
            "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2,
            "resample": 3, **COLOURS, **sizes,
        })
    )  # fmt: skip


_PROCESSORS: dict[str, Any] = {
    "PixtralImageProcessor": PixtralImageProcessorPil,
    "Gemma3ImageProcessor": Gemma3ImageProcessorPil,
    "Gemma4ImageProcessor": Gemma4ImageProcessorPil,
    "Qwen2VLImageProcessor": Qwen2VLImageProcessorPil,
}
"""transformers' image processors by Pillow; the others need torchvision."""


class SeeingOracle:
    """transformers' image processor and whole model in float32."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        name = json.loads((folder / "config.json").read_text())["architectures"][0]
        self.model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None  # Nothing ends an answer but its length.

    @cached_property
    def parts(self) -> tuple[Any, Any]:
        """The tokenizer and the image processor; the class of both needs torchvision."""
        values = json.loads((self._folder / "preprocessor_config.json").read_text())
        kind = _PROCESSORS[values.pop("image_processor_type")]
        return transformers.PreTrainedTokenizerFast.from_pretrained(self._folder), kind(**values)

    def inputs(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What the model is given of a chat of OpenAI's API."""
        tokenizer, processor = self.parts
        told, pictures = list[dict[str, Any]](), list[Any]()
        for message in messages:
            content = message["content"]
            if not isinstance(content, str):
                pictures += [load_image(part["image_url"]["url"]) for part in content if part["type"] == "image_url"]
                content = [{"type": "image"} if p["type"] == "image_url" else p for p in content]
            told.append({**message, "content": content})
        text = tokenizer.apply_chat_template(told, add_generation_prompt=True, tokenize=False)
        if isinstance(processor, PixtralImageProcessorPil):
            return self._pixtral(text, pictures)
        seen = processor(pictures, return_tensors="pt") if pictures else {}
        if isinstance(processor, Gemma3ImageProcessorPil):
            begin, end, token = GEMMA_MARKS
            text = text.replace(begin, f"\n\n{begin}{token * GEMMA_TOKENS}{end}\n\n")
            seen.pop("num_crops", None)
        elif isinstance(processor, Gemma4ImageProcessorPil):
            begin, end, token = GEMMA4_MARKS
            first, *others = text.split(token)
            for count, after in zip(seen.pop("num_soft_tokens_per_image", ()), others, strict=True):
                first += f"{begin}{token * int(count)}{end}{after}"
            text = first
        else:
            token = QWEN_MARKS[2]
            first, *others = text.split(token)
            for (_, down, across), after in zip(seen.get("image_grid_thw", ()), others, strict=True):
                first += token * (int(down) * int(across) // 4) + after
            text = first
        found = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        found.pop("token_type_ids", None)
        types = (found["input_ids"] == tokenizer.convert_tokens_to_ids(token)).long()
        key = "token_type_ids" if isinstance(processor, Gemma3ImageProcessorPil) else "mm_token_type_ids"
        return {**found, **seen, key: types}

    def _pixtral(self, text: str, pictures: Sequence[Any]) -> dict[str, Any]:
        tokenizer, processor = self.parts
        seen = processor(pictures, patch_size=UNIT, return_tensors="pt") if pictures else {}
        first, *others = text.split(MARKS[0])
        for (height, width), after in zip(seen.get("image_sizes", ()), others, strict=True):
            row = MARKS[0] * (width // UNIT)
            first += (row + MARKS[1]) * (height // UNIT - 1) + row + MARKS[2] + after
        found = tokenizer(first, return_tensors="pt", add_special_tokens=False)
        found.pop("token_type_ids", None)
        return {**found, **seen}

    @torch.inference_mode()
    def generate(
        self, messages: Sequence[Mapping[str, Any]], count: int, **options: Any
    ) -> tuple[list[int], list[int]]:
        """The prompt's tokens, with placeholders, and the greedy answer."""
        inputs = self.inputs(messages)
        out = self.model.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0, **options)
        prompt = inputs["input_ids"][0].tolist()
        return prompt, out[0].tolist()[len(prompt) :]


def pattern(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """Gradients with noise, [height, width, 3]."""
    rows, columns = np.mgrid[0:height, 0:width]
    noise = np.random.default_rng(seed).integers(0, 64, (height, width, 3))
    bands = np.stack((rows * 7 + seed * 31, columns * 5, rows + columns * 3), axis=-1)
    return ((bands + noise) % 256).astype(np.uint8)


def png(picture: Image.Image | NDArray[np.uint8], kind: str = "PNG", **options: Any) -> bytes:
    """A picture's file."""
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def asks(*parts: str | bytes, role: str = "user") -> dict[str, Any]:
    """A message of texts and of files of pictures."""
    content: list[dict[str, Any]] = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]
    return {"role": role, "content": content}
