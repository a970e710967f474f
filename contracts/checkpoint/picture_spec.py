"""The picture spec: how a model that sees takes pictures, as its processor's files say: to which size each is brought,
how its pixels become numbers, and which tokens stand for it in a prompt.

transformers writes `processor_config.json` with the image processor's settings inside; folders that were published
before have them in `preprocessor_config.json`. A checkpoint of which something isn't known is served as text alone,
with a warning that says why.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from twinpool.contracts.checkpoint.json_fields import JsonFields
from twinpool.contracts.checkpoint.safetensors_headers import read_json
from twinpool.contracts.checkpoint.tokenizer_files import read_tokenizer_files
from twinpool.contracts.errors import CheckpointError

NONE = -1
"""The id of a token that a family has none of."""
PICTURE_BYTES = 48 * 1024**2
"""Bytes of pixels, after they were resized, of all pictures of a request: they travel in one message. As many as the
largest picture has that a published processor makes (2^24 pixels, Qwen3-VL's)."""
_PIXTRAL = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
_CLIP = {"image_mean": (0.48145466, 0.4578275, 0.40821073), "image_std": (0.26862954, 0.26130258, 0.27577711)}
_HALVES = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)}
_AS_THEY_ARE = {"image_mean": (0.0, 0.0, 0.0), "image_std": (1.0, 1.0, 1.0)}
_BILINEAR, _BICUBIC = 2, 3
"""Pillow's numbers of filters."""
_NARROWEST = 200
"""How often a picture's shorter side goes into the longer one at most, by Qwen's processors."""


class UnfitPicture(ValueError):
    """A picture of a size that the model can't take; the text says why."""


@dataclass(frozen=True, slots=True)
class PictureSpec:
    """Plain values, which a router's processes send each other."""

    family: str
    """Which tower computes it: ``pixtral``, ``siglip`` (Gemma 3), ``gemma4``, or one of Qwen's: ``qwen2_vl``,
    ``qwen2_5_vl``, ``qwen3_vl``, ``qwen3_5``."""
    token: int
    """The id of the placeholder: a chat template writes one for a picture, a prompt has one for each of its
    positions."""
    row_end: int
    end: int
    """The ids of the tokens behind each row of a picture, and behind the last one; `NONE` for none."""
    patch: int
    """Pixels of a patch's side."""
    merge: int
    """Patches of the side of what becomes one position."""
    longest: int
    """The most pixels of a side; of ``siglip`` those of every side, of ``gemma4`` and Qwen's the most of a picture."""
    resample: int
    """Pillow's filter by its number."""
    rescale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    least: int = 0
    """Of Qwen's: the fewest pixels of a picture."""
    marker: str = ""
    """What a chat template writes for a picture, where the processor writes `written` in its place before the text is
    tokenised; empty: it writes the placeholder."""
    written: str = ""
    ahead: bool = False
    """Of ``gemma4``: whether positions of a picture see each other."""

    @property
    def unit(self) -> int:
        """Pixels of the side of what becomes one position."""
        return self.patch * self.merge

    @property
    def whole(self) -> bool:
        """Whether a picture's positions see each other, those behind them too: one step computes all of them."""
        return self.family == "siglip" or self.ahead

    @property
    def turned(self) -> bool:
        """Whether positions are turned (by rope) by their row and column in the picture (M-RoPE, arXiv 2409.12191)."""
        return self.family.startswith("qwen")

    def across(self, width: int) -> int:
        """How many positions a row of a picture has that is turned by rows and columns; 0: it isn't."""
        return width // self.unit if self.turned else 0

    def size(self, height: int, width: int) -> tuple[int, int]:
        """The height and width, in pixels, to which a picture is resized. Raises `UnfitPicture`."""
        if self.family == "siglip":
            return self.longest, self.longest
        if self.family == "gemma4":
            return self._filled(height, width)
        if self.turned:
            return self._rounded(height, width)
        ratio = max(height, width) / self.longest
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        if not height or not width:
            raise UnfitPicture(f"it is too long and narrow: its longer side may have {self.longest} pixels")
        return (-(-height // self.unit) * self.unit, -(-width // self.unit) * self.unit)

    def _rounded(self, height: int, width: int) -> tuple[int, int]:
        """Whole units near to the picture's own size, of no fewer pixels than `least` and no more than `longest`."""
        unit = self.unit
        if max(height, width) > _NARROWEST * min(height, width):
            raise UnfitPicture(f"it is too long and narrow: a side may have {_NARROWEST} times the pixels of the other")
        down, across = round(height / unit), round(width / unit)  # Of halves, to even ones.
        if down * across * unit * unit > self.longest:
            factor = math.sqrt(height * width / self.longest)
            down, across = (max(1, math.floor(side / factor / unit)) for side in (height, width))
        elif down * across * unit * unit < self.least:
            factor = math.sqrt(self.least / (height * width))
            down, across = (math.ceil(side * factor / unit) for side in (height, width))
        return down * unit, across * unit

    def _filled(self, height: int, width: int) -> tuple[int, int]:
        """As many whole units as there may be, beside and below each other as the picture has pixels."""
        factor = math.sqrt(self.longest / (height * width))
        down, across = (math.floor(factor * side / self.unit) for side in (height, width))
        most = self.longest // self.unit**2
        if not down:
            down, across = 1, min(width // height, most)
        elif not across:
            down, across = min(height // width, most), 1
        return down * self.unit, across * self.unit

    def most_pixels(self, taken: int) -> int:
        """The most pixels of a picture that was resized, of ones with no more than `taken`."""
        if self.family == "siglip":
            return self.longest**2
        if self.family == "gemma4":
            return self.longest
        return min(self.longest if self.turned else self.longest**2, max(taken, self.least))

    def count(self, height: int, width: int) -> int:
        """How many positions a picture of a size that `size` gave has."""
        return height // self.unit * (width // self.unit)

    @property
    def whole_positions(self) -> int:
        """How many positions a picture has that a step computes as a whole; 0: any step may end within one."""
        return self.most_pixels(0) // self.unit**2 if self.whole else 0

    def layout(self, height: int, width: int, keys: list[int]) -> list[int]:
        """The tokens of a picture of such a size in a prompt, with `keys` at its positions."""
        if self.row_end == NONE:
            return keys
        across, found = width // self.unit, list[int]()
        for begin in range(0, len(keys), across):
            found += [*keys[begin : begin + across], self.row_end]
        return [*found[:-1], self.end]

    def digest(self, height: int, width: int, pixels: bytes) -> bytes:
        """SHA-256 of a resized picture and of all that decides how its pixels become numbers."""
        usual = {one.name: one.default for one in fields(self)}
        known = {name: value for name, value in asdict(self).items() if value != usual[name]}
        how = json.dumps([known, height, width], sort_keys=True).encode()
        return hashlib.sha256(len(how).to_bytes(4, "little") + how + pixels).digest()


def read_picture_spec(folder: Path, architecture: str) -> tuple[PictureSpec | None, str]:
    """The picture spec of a checkpoint; None where it doesn't see, or isn't known well enough, and then why in words,
    if it sees. Raises `CheckpointError` for a file that can't be read."""
    read = _READERS.get(architecture)
    if read is None or not (folder / "config.json").is_file():
        return None, ""
    try:
        return read(folder), ""
    except CheckpointError as error:
        return None, f"images are refused, and the text alone is served: {error}"


def vision_fields(folder: Path) -> tuple[JsonFields, JsonFields]:
    """The keys of `config.json` and those of its ``vision_config``. Raises `CheckpointError`."""
    path = folder / "config.json"
    values = read_json(path)
    return JsonFields(path, values), JsonFields(path, JsonFields(path, values).table("vision_config"))


def tower_widths(vision: JsonFields, family: str) -> tuple[int, int]:
    """The hidden size of a family's tower, and how many inner units its feed-forward layers have, by the keys of
    ``vision_config``. Raises `CheckpointError`."""
    if family == "qwen2_vl":  # Whose hidden_size is the text's.
        width = vision.size("embed_dim", 1280)
        return width, int(width * vision.number("mlp_ratio", 4.0))
    return vision.size("hidden_size"), vision.size("intermediate_size")


def _pixtral(folder: Path) -> PictureSpec:
    config, vision = vision_fields(folder)
    whole, processor = _processor(folder)
    names = {key: whole.text(key, usual) for key, usual in _PIXTRAL.items()}
    ids = _known_ids(folder, names.values())
    if config.peek("vision_feature_layer") not in (None, -1):
        raise config.refuse("vision_feature_layer is not the last one, which is not supported")
    patch, merge = vision.size("patch_size"), config.size("spatial_merge_size", 2)
    size = processor.table("size")
    longest = size.get("longest_edge")
    if not isinstance(longest, int) or not 0 < longest <= 2**16:
        raise processor.refuse(f"size must have a longest_edge, got {dict(size)}")
    if whole.size("patch_size", patch) * whole.size("spatial_merge_size", merge) != patch * merge:
        raise whole.refuse("patch_size and spatial_merge_size are not those of config.json")
    first, second, third = (ids[name] for name in names.values())
    if first != config.size("image_token_index", config.size("image_token_id", first)):
        raise config.refuse(f"image_token_id is not the id {first} of {names['image_token']}")
    return PictureSpec("pixtral", first, second, third, patch, merge, longest, *_numbers(processor, _CLIP, _BICUBIC))


def _siglip(folder: Path) -> PictureSpec:
    """Gemma 3: every picture is a square, and as many positions."""
    config, vision = vision_fields(folder)
    whole, processor = _processor(folder)
    names = _token_names(folder, {"image": "<image_soft_token>", "boi": "<start_of_image>", "eoi": "<end_of_image>"})
    ids = _known_ids(folder, names.values())
    if processor.flag("do_pan_and_scan"):
        raise processor.refuse("do_pan_and_scan is true, which is not supported")
    side, patch = vision.size("image_size"), vision.size("patch_size")
    tokens = config.size("mm_tokens_per_image", 256)
    if processor.table("size") != {"height": side, "width": side}:
        raise processor.refuse(f"size must be the {side} pixels of vision_config.image_size")
    if whole.size("image_seq_length", tokens) != tokens:
        raise whole.refuse(f"image_seq_length must be the {tokens} of mm_tokens_per_image")
    patches, across = side // patch, math.isqrt(tokens)
    if across * across != tokens or side % patch or patches % across:
        raise config.refuse(f"mm_tokens_per_image {tokens} does not divide {patches} by {patches} patches")
    window = config.table("text_config").get("sliding_window")
    if isinstance(window, int) and window < tokens:
        raise config.refuse(f"sliding_window {window} is less than the {tokens} of mm_tokens_per_image")
    token = ids[names["image"]]
    if token != config.size("image_token_index", config.size("image_token_id", token)):
        raise config.refuse(f"image_token_index is not the id {token} of {names['image']}")
    written = f"\n\n{names['boi']}{names['image']}{names['eoi']}\n\n"
    numbers = _numbers(processor, _HALVES, _BILINEAR)
    merge, marker = patches // across, names["boi"]
    return PictureSpec("siglip", token, NONE, NONE, patch, merge, side, *numbers, marker=marker, written=written)


def _gemma4(folder: Path) -> PictureSpec:
    """Gemma 4: each picture is enlarged or made smaller to about the same number of positions."""
    config, vision = vision_fields(folder)
    _, processor = _processor(folder)
    names = _token_names(folder, {"image": "<|image|>", "boi": "<|image>", "eoi": "<image|>"})
    token = _known_ids(folder, names.values())[names["image"]]
    if token != config.size("image_token_id", token):
        raise config.refuse(f"image_token_id is not the id {token} of {names['image']}")
    shape = []
    for key, usual in (("patch_size", 16), ("pooling_kernel_size", 3)):
        shape.append(vision.size(key, usual))
        if processor.size(key, usual) != shape[-1]:
            raise processor.refuse(f"{key} must be the {shape[-1]} of vision_config")
    patch, merge = shape
    most, text = processor.size("max_soft_tokens", 280), JsonFields(config.path, config.table("text_config"))
    if most * merge > vision.size("position_embedding_size", 10_240):
        raise vision.refuse(f"position_embedding_size is less than max_soft_tokens {most} need")
    heads = vision.size("num_attention_heads")
    if vision.size("num_key_value_heads", heads) != heads:
        raise vision.refuse("num_key_value_heads is not num_attention_heads, which is not supported")
    if vision.text("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise vision.refuse("hidden_activation is not gelu_pytorch_tanh, which is not supported")
    ahead = text.peek("use_bidirectional_attention") == "vision"
    window = text.peek("sliding_window")
    if ahead and isinstance(window, int) and window < most:
        raise text.refuse(f"sliding_window {window} is less than the {most} of max_soft_tokens")
    numbers = _numbers(processor, _AS_THEY_ARE, _BICUBIC, normalised=False)
    written = f"{names['boi']}{names['image']}{names['eoi']}"
    longest = most * (patch * merge) ** 2
    return PictureSpec(
        "gemma4",
        token,
        NONE,
        NONE,
        patch,
        merge,
        longest,
        *numbers,
        marker=names["image"],
        written=written,
        ahead=ahead,
    )


def _qwen(folder: Path, family: str) -> PictureSpec:
    """Qwen's: pictures near to their own size."""
    config, vision = vision_fields(folder)
    _, processor = _processor(folder)
    names = _token_names(folder, {"image": "<|image_pad|>"})
    token = _known_ids(folder, names.values())[names["image"]]
    if token != config.size("image_token_id", token):
        raise config.refuse(f"image_token_id is not the id {token} of {names['image']}")
    shape: list[int] = []
    for key, of_model, usual in (("patch_size", "patch_size", 14), ("merge_size", "spatial_merge_size", 2)):
        shape.append(vision.size(of_model, usual))
        if processor.size(key, usual) != shape[-1]:
            raise processor.refuse(f"{key} must be the {shape[-1]} of vision_config.{of_model}")
    if (processor.size("temporal_patch_size", 2), vision.size("temporal_patch_size", 2)) != (2, 2):
        raise processor.refuse("temporal_patch_size must be 2")
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280} | dict(processor.table("size"))
    for key, older in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        size[key] = processor.peek(older) or size[key]
    least, most = size["shortest_edge"], size["longest_edge"]
    if not isinstance(least, int) or not isinstance(most, int) or not 0 < least <= most < 2**31:
        raise processor.refuse(f"size must have a shortest_edge and a longest_edge, got {size}")
    numbers = _numbers(processor, _CLIP, _BICUBIC)
    patch, merge = shape
    return PictureSpec(family, token, NONE, NONE, patch, merge, most, *numbers, least=least)


_READERS: dict[str, Callable[[Path], PictureSpec]] = {
    "Mistral3ForConditionalGeneration": _pixtral,
    "Gemma3ForConditionalGeneration": _siglip,
    "Gemma4ForConditionalGeneration": _gemma4,
    "Qwen2VLForConditionalGeneration": partial(_qwen, family="qwen2_vl"),
    "Qwen2_5_VLForConditionalGeneration": partial(_qwen, family="qwen2_5_vl"),
    "Qwen3VLForConditionalGeneration": partial(_qwen, family="qwen3_vl"),
    "Qwen3VLMoeForConditionalGeneration": partial(_qwen, family="qwen3_vl"),
    "Qwen3_5ForConditionalGeneration": partial(_qwen, family="qwen3_5"),
    "Qwen3_5MoeForConditionalGeneration": partial(_qwen, family="qwen3_5"),
}
"""What reads the picture spec of a checkpoint, by its architecture."""


def _processor(folder: Path) -> tuple[JsonFields, JsonFields]:
    """The keys of the processor, and of its image processor. Raises `CheckpointError` where there are none."""
    outer, inner = folder / "processor_config.json", folder / "preprocessor_config.json"
    values = read_json(outer) if outer.is_file() else {}
    nested = values.get("image_processor")
    if isinstance(nested, Mapping):
        return JsonFields(outer, values), JsonFields(outer, nested)
    if not inner.is_file():
        raise CheckpointError(f"{folder} has no preprocessor_config.json")
    return JsonFields(outer, values), JsonFields(inner, read_json(inner))


def _numbers(
    processor: JsonFields, usual_colours: Mapping[str, tuple[float, ...]], resample: int, *, normalised: bool = True
) -> tuple[int, float, tuple[float, float, float], tuple[float, float, float]]:
    """The filter, the factor, and the mean and the deviation of each colour."""
    for key, usual in (("do_resize", True), ("do_rescale", True), ("do_normalize", normalised)):
        if processor.flag(key, usual) != usual:
            raise processor.refuse(f"{key} is {str(not usual).lower()}, which is not supported")
    colours: list[tuple[float, float, float]] = []
    for key, colour in usual_colours.items():
        given: Any = processor.values.get(key, colour) if normalised else colour
        if not isinstance(given, list | tuple) or len(given) != 3 or not all(isinstance(n, int | float) for n in given):
            raise processor.refuse(f"{key} must be three numbers, got {given!r}")
        red, green, blue = map(float, given)
        colours.append((red, green, blue))
    return processor.count("resample", resample), processor.number("rescale_factor", 1 / 255), colours[0], colours[1]


def _token_names(folder: Path, usual: Mapping[str, str]) -> dict[str, str]:
    """The names of a picture's tokens, which `tokenizer_config.json` may say as ``image_token`` and so on."""
    path = folder / "tokenizer_config.json"
    said = JsonFields(path, read_json(path) if path.is_file() else {})
    return {key: said.text(f"{key}_token", name) for key, name in usual.items()}


def _known_ids(folder: Path, names: Collection[str]) -> dict[str, int]:
    """The ids of added tokens of these names. Raises `CheckpointError` where one is missing."""
    added = read_tokenizer_files(folder).tree.get("added_tokens", ())
    ids = {str(token["content"]): int(token["id"]) for token in added}
    if lacking := [name for name in names if name not in ids]:
        raise CheckpointError(f"{folder}: the tokenizer has no token {', '.join(lacking)}")
    return {name: ids[name] for name in names}
