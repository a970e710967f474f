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
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from twinpool.contracts.checkpoint.json_fields import JsonFields
from twinpool.contracts.checkpoint.safetensors_headers import read_json
from twinpool.contracts.checkpoint.tokenizer_files import read_tokenizer_files
from twinpool.contracts.errors import CheckpointError

NONE = -1
"""The id of a token that a family has none of."""
PICTURE_BYTES = 32 * 1024**2
"""Bytes of pixels, after they were resized, of all pictures of a request: they travel in one message."""
_PIXTRAL = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
_CLIP = {"image_mean": (0.48145466, 0.4578275, 0.40821073), "image_std": (0.26862954, 0.26130258, 0.27577711)}
_BICUBIC = 3
"""Pillow's number of the filter."""


class UnfitPicture(ValueError):
    """A picture of a size that the model can't take; the text says why."""


@dataclass(frozen=True, slots=True)
class PictureSpec:
    """Plain values, which a router's processes send each other."""

    family: str
    """Which tower computes it: ``pixtral``."""
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
    """The most pixels of a side."""
    resample: int
    """Pillow's filter by its number."""
    rescale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def unit(self) -> int:
        """Pixels of the side of what becomes one position."""
        return self.patch * self.merge

    def size(self, height: int, width: int) -> tuple[int, int]:
        """The height and width, in pixels, to which a picture is resized. Raises `UnfitPicture`."""
        ratio = max(height, width) / self.longest
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        if not height or not width:
            raise UnfitPicture(f"it is too long and narrow: its longer side may have {self.longest} pixels")
        return (-(-height // self.unit) * self.unit, -(-width // self.unit) * self.unit)

    def count(self, height: int, width: int) -> int:
        """How many positions a picture of a size that `size` gave has."""
        return height // self.unit * (width // self.unit)

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
        how = json.dumps([asdict(self), height, width], sort_keys=True).encode()
        return hashlib.sha256(len(how).to_bytes(4, "little") + how + pixels).digest()


def read_picture_spec(folder: Path, architecture: str) -> tuple[PictureSpec | None, str]:
    """The picture spec of a checkpoint; None where it doesn't see, or isn't known well enough, and then why in words,
    if it sees. Raises `CheckpointError` for a file that can't be read."""
    if architecture != "Mistral3ForConditionalGeneration" or not (folder / "config.json").is_file():
        return None, ""
    try:
        return _pixtral(folder), ""
    except CheckpointError as error:
        return None, f"images are refused, and the text alone is served: {error}"


def vision_fields(folder: Path) -> tuple[JsonFields, JsonFields]:
    """The keys of `config.json` and those of its ``vision_config``. Raises `CheckpointError`."""
    path = folder / "config.json"
    values = read_json(path)
    return JsonFields(path, values), JsonFields(path, JsonFields(path, values).table("vision_config"))


def _pixtral(folder: Path) -> PictureSpec:
    config, vision = vision_fields(folder)
    whole, processor = _processor(folder)
    names = {key: whole.text(key, usual) for key, usual in _PIXTRAL.items()}
    ids = _special_ids(folder)
    if lacking := [name for name in names.values() if name not in ids]:
        raise CheckpointError(f"{folder}: the tokenizer has no token {', '.join(lacking)}")
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
    return PictureSpec("pixtral", first, second, third, patch, merge, longest, *_numbers(processor))


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


def _numbers(processor: JsonFields) -> tuple[int, float, tuple[float, float, float], tuple[float, float, float]]:
    """The filter, the factor, and the mean and the deviation of each colour."""
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if not processor.flag(key, True):
            raise processor.refuse(f"{key} is false, which is not supported")
    colours: list[tuple[float, float, float]] = []
    for key, usual in _CLIP.items():
        given: Any = processor.values.get(key, usual)
        if not isinstance(given, list | tuple) or len(given) != 3 or not all(isinstance(n, int | float) for n in given):
            raise processor.refuse(f"{key} must be three numbers, got {given!r}")
        red, green, blue = map(float, given)
        colours.append((red, green, blue))
    return processor.count("resample", _BICUBIC), processor.number("rescale_factor", 1 / 255), colours[0], colours[1]


def _special_ids(folder: Path) -> dict[str, int]:
    """The ids of added tokens by their names."""
    added = read_tokenizer_files(folder).tree.get("added_tokens", ())
    return {str(token["content"]): int(token["id"]) for token in added}
