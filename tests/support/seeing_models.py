"""Small checkpoints of models that see, with random weights, and what transformers answers with them: the oracle gets
the very messages that a client sends, pictures as data URLs in them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
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
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from tests.support.checkpoints import VOCAB, write_tokenizer
from tests.support.family_checkpoint import COMMON

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
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type in ['image', 'image_url'] %}[IMG]{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_mistral3(folder: Path, *, longest: int = 64, seed: int = 5, dtype: str = "float32") -> Path:
    """Write a Mistral 3 with a tower of two layers, whose pictures have `longest` pixels a side and 8 a position."""
    size = VOCAB + len(MARKS)
    config = transformers.Mistral3Config(
        text_config=TEXT
        | {
            "model_type": "mistral",
            "head_dim": 16,
            "sliding_window": None,
            "vocab_size": size,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        vision_config=PIXTRAL,
        image_token_index=VOCAB,
        tie_word_embeddings=False,
        eos_token_id=0,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.Mistral3ForConditionalGeneration(config)
        for key, tensor in model.named_parameters():
            if "norm" in key or "ln_pre" in key:
                tensor.data.uniform_(0.5, 1.5)
            else:
                tensor.data.normal_(0.0, 0.2)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    write_tokenizer(folder, VOCAB, chat=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= VOCAB
    for number in range(tokenizer.get_vocab_size(), VOCAB):
        tokenizer.add_tokens([AddedToken(f"<unused {number}>", special=False)])
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": TEMPLATE})
    )
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": "PixtralProcessor", "patch_size": 4, "spatial_merge_size": 2})
    )
    (folder / "preprocessor_config.json").write_text(
        json.dumps({
            "image_processor_type": "PixtralImageProcessor", "patch_size": {"height": 4, "width": 4}, "resample": 3,
            "size": {"longest_edge": longest}, "rescale_factor": 1 / 255, "do_convert_rgb": True,
            "image_mean": [0.5, 0.4, 0.3], "image_std": [0.3, 0.2, 0.25],
        })
    )  # fmt: skip
    return folder


class SeeingOracle:
    """transformers' processor and whole model in float32."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.model = transformers.Mistral3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()

    @cached_property
    def _parts(self) -> tuple[Any, Any]:
        """The tokenizer and the image processor; the class of both needs torchvision."""
        values = json.loads((self._folder / "preprocessor_config.json").read_text())
        del values["image_processor_type"]
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(self._folder)
        return tokenizer, PixtralImageProcessorPil(**values)

    def inputs(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What the model is given of a chat of OpenAI's API."""
        tokenizer, processor = self._parts
        told, pictures = list[dict[str, Any]](), list[Any]()
        for message in messages:
            content = message["content"]
            if not isinstance(content, str):
                pictures += [load_image(part["image_url"]["url"]) for part in content if part["type"] == "image_url"]
                content = [{"type": "image"} if p["type"] == "image_url" else p for p in content]
            told.append({**message, "content": content})
        text = tokenizer.apply_chat_template(told, add_generation_prompt=True, tokenize=False)
        seen = processor(pictures, patch_size=UNIT, return_tensors="pt") if pictures else {}
        first, *others = text.split(MARKS[0])
        for (height, width), after in zip(seen.get("image_sizes", ()), others, strict=True):
            row = MARKS[0] * (width // UNIT)
            first += (row + MARKS[1]) * (height // UNIT - 1) + row + MARKS[2] + after
        return {**tokenizer(first, return_tensors="pt", add_special_tokens=False), **seen}

    @torch.inference_mode()
    def generate(
        self, messages: Sequence[Mapping[str, Any]], count: int, **options: Any
    ) -> tuple[list[int], list[int]]:
        """The prompt's tokens, with placeholders, and the greedy answer."""
        inputs = self.inputs(messages)
        inputs.pop("token_type_ids", None)
        out = self.model.generate(
            **inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0, **options
        )
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
