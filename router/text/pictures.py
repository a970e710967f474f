"""Pictures of a chat: from what a client sent to pixels of the size that the model takes, and to the tokens that stand
for them.

What a client sends is hostile until it is decoded. So it is read in a process that has nothing else to lose (a reader),
its format and size are known from its header before anything is unpacked, and both are bounded. Only a few formats are
tried, and what is sent on to workers is pixels. They are the pixels that transformers makes of the same URL: turned as
EXIF says, without an alpha channel, and resized by Pillow.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from twinpool.contracts.block_hash import picture_keys
from twinpool.contracts.checkpoint.picture_spec import PICTURE_BYTES, PictureSpec, UnfitPicture
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.errors import RequestError
from twinpool.contracts.image_urls import RefusedUrl, UrlRules
from twinpool.contracts.messages.router_commands import Picture
from twinpool.router.text.chat_template import PicturePart, TextParts

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""What is decoded, by Pillow's names; of a GIF, and of any other that moves, the first picture."""
_NAMED = ", ".join(FORMATS)
_DATA = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+=[\w.+-]*)*;base64,", re.ASCII | re.IGNORECASE)
_FETCHED = ("http://", "https://")
_SIDE = 65_535
"""The most pixels of a side; no format but PNG has more."""


class WantedImage(NamedTuple):
    """An image of a request that is to be fetched."""

    url: str
    where: str
    """Its place in the request's body."""


class ImagesWanted(Exception):
    """Raised where a body names images by URLs that may be fetched and weren't yet."""

    def __init__(self, images: Sequence[WantedImage]) -> None:
        super().__init__(f"{len(images)} images are to be fetched")
        self.images = tuple(images)


@dataclass(frozen=True)
class ImageSources:
    """Where images of a request may come from besides its body."""

    rules: UrlRules
    fetched: Mapping[str, bytes] = field(default_factory=dict)
    """What was fetched for it, by URL."""


class PlacedPicture(NamedTuple):
    """A picture, and the tokens that stand for it in the prompt."""

    picture: Picture
    tokens: list[int]


def pictures_of(messages: Sequence[Mapping[str, Any]]) -> list[PicturePart]:
    """The pictures of a chat's messages, in order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, TextParts) for part in content.parts]
    return [part for part in parts if isinstance(part, PicturePart)]


def read_pictures(
    parts: Sequence[PicturePart], spec: PictureSpec | None, config: RouterConfig, sources: ImageSources
) -> list[PlacedPicture]:
    """Decode a request's pictures. Raises `RequestError` naming the part that is wrong, or the limit, and
    `ImagesWanted` where some are to be fetched first."""
    if spec is None or not config.max_images:
        raise _refusal(parts[0], "this server takes no images")
    if len(parts) > config.max_images:
        raise _refusal(parts[config.max_images], f"more than {config.max_images} images in one request")
    if wanted := [WantedImage(part.source, part.where) for part in parts if _is_wanted(part, sources)]:
        raise ImagesWanted(wanted)
    read: list[PlacedPicture] = []
    left = PICTURE_BYTES
    for part in parts:
        data = sources.fetched[part.source] if part.source in sources.fetched else _decoded(part, sources.rules)
        placed = _read(part, data, spec, config.max_image_pixels)
        left -= len(placed.picture.pixels)
        if left < 0:
            raise _refusal(part, f"the images of one request have more than {PICTURE_BYTES >> 20} MiB of pixels")
        read.append(placed)
    return read


def expanded(tokens: Sequence[int], placed: Sequence[PlacedPicture]) -> tuple[int, ...]:
    """The tokens of a rendered chat, with those of each picture in place of its placeholder. Raises `RequestError`
    where there isn't one placeholder for each."""
    token = placed[0].picture.token
    if tokens.count(token) != len(placed):
        raise RequestError(
            f"the chat template made {tokens.count(token)} placeholders of {len(placed)} images: images belong into "
            "messages of users, and no text may have the placeholder's name",
            param="messages",
        )
    left, found = iter(placed), list[int]()
    for one in tokens:
        found += next(left).tokens if one == token else (one,)
    return tuple(found)


def _is_wanted(part: PicturePart, sources: ImageSources) -> bool:
    """Whether a picture is to be fetched first. Raises `RequestError` where it may not be."""
    if not sources.rules or part.source in sources.fetched or not part.source[:8].lower().startswith(_FETCHED):
        return False
    try:
        sources.rules.check(part.source)
    except RefusedUrl as error:
        raise _refusal(part, str(error)) from None
    return True


def _read(part: PicturePart, data: bytes, spec: PictureSpec, most: int) -> PlacedPicture:
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise _refusal(part, "this server can't decode images: pip install 'twinpool[images]'") from None
    if data[:256].lstrip().startswith((b"<svg", b"<?xml", b"<!DOCTYPE")):
        raise _refusal(part, f"SVG is not read here; send one of {_NAMED}")
    try:
        opened = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise _refusal(part, "the image has more pixels than Pillow takes") from None
    except Exception:  # Of many kinds: what the header makes a decoder do.
        raise _refusal(part, f"it is no image of a format that is read here ({_NAMED})") from None
    width, height = opened.size
    if width * height > most or max(width, height) > _SIDE:
        raise _refusal(part, f"the image has {width} by {height} pixels; at most {most} are taken")
    try:
        # In place, and colours only where there are others: a copy of a photo may have 256 MiB.
        ImageOps.exif_transpose(opened, in_place=True)
        height, width = spec.size(opened.height, opened.width)
        if height * width * 3 > PICTURE_BYTES:
            raise UnfitPicture("it is too large for the model")
        coloured = opened if opened.mode == "RGB" else opened.convert("RGB")
        resized = coloured.resize((width, height), resample=spec.resample)
    except UnfitPicture as error:
        raise _refusal(part, f"the image has {opened.width} by {opened.height} pixels, and {error}") from None
    except MemoryError:
        raise
    except Exception as error:  # As above: truncated or damaged.
        raise _refusal(part, f"the image can't be decoded: {error!s:.100}") from None
    pixels, count = resized.tobytes(), spec.count(height, width)
    keys = picture_keys(spec.digest(height, width, pixels), count)
    picture = Picture(spec.token, height, width, count, pixels, spec.across(width), spec.whole)
    return PlacedPicture(picture, spec.layout(height, width, keys))


def _decoded(part: PicturePart, rules: UrlRules) -> bytes:
    """The bytes of a data URL. Raises `RequestError`."""
    found = _DATA.match(part.source)
    if found is None:
        also = ", or of http or https" if rules else ""
        if not rules and part.source[:8].lower().startswith(_FETCHED):
            also = ": this server fetches no images (router.image_urls is empty)"
        told = f"the URL must be of data in base64 (data:image/png;base64,...){also}; got {part.source[:32]!r}"
        raise _refusal(part, told)
    if (found[1] or "").lower() == "image/svg+xml":
        raise _refusal(part, f"SVG is not read here; send one of {_NAMED}")
    try:
        return base64.b64decode(part.source[found.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise _refusal(part, "what follows ;base64, is not base64") from None


def _refusal(part: PicturePart, reason: str) -> RequestError:
    return RequestError(f"{part.where}: {reason}", param="messages")
