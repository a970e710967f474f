"""Pictures that clients send: what is decoded, and what is refused before it can do harm."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from tests.router.fake_worker import FakeCluster
from tests.support.seeing_models import (
    MARKS,
    UNIT,
    asks,
    data_url,
    pattern,
    png,
    write_gemma3,
    write_mistral3,
    write_qwen3_vl,
)
from twinpool.contracts.block_hash import PICTURE_KEYS, in_vocabulary
from twinpool.contracts.checkpoint.model_spec import ModelSpec, read_model_spec
from twinpool.contracts.checkpoint.picture_spec import PictureSpec, read_picture_spec
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.errors import RequestError
from twinpool.router.service.router_service import RouterService
from twinpool.router.text.tokenizer import ModelTokenizer, read_model_tokenizer
from twinpool.router.tokenizer_pool.prepare_request import BODY_BYTES_IMAGES, BodyReader, PreparedPrompt, body_limit
from twinpool.router.tokenizer_pool.tokenizer_pool import read_inline
from twinpool.router.tokenizer_pool.tokenizer_process import (
    FrameKind,
    answer,
    prepared_of,
    setup_frame,
    spec_of,
    unpacked_setup,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mistral3(tmp_path_factory.mktemp("seer") / "mistral3")


@pytest.fixture(scope="module")
def spec(folder: Path) -> ModelSpec:
    return read_model_spec(folder)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ModelTokenizer:
    return read_model_tokenizer(folder, 100_000)


@pytest.fixture(scope="module")
def reader(spec: ModelSpec, tokenizer: ModelTokenizer) -> BodyReader:
    return BodyReader(spec, tokenizer, RouterConfig(max_images=3, max_image_pixels=1 << 20))


def chat(reader: BodyReader, *messages: dict[str, Any], **fields: Any) -> PreparedPrompt:
    return reader.chat(json.dumps({"messages": messages, **fields}).encode()).prompts[0]


def shown(url: object) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


def header_alone(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says how large it is."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = b""
    for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")):
        chunks += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return b"\x89PNG\r\n\x1a\n" + chunks


PNG = png(pattern(40, 30))
NOISE = np.random.default_rng(0).integers(0, 256, (90, 90, 3)).astype(np.uint8)
HOSTILE: dict[str, tuple[object, str]] = {
    "bomb": (data_url(header_alone(60_000, 60_000)), "more pixels than Pillow takes"),
    "bomb of a size that Pillow takes": (data_url(header_alone(1025, 1024)), "1025 by 1024 pixels; at most 1048576"),
    "long": (data_url(png(Image.new("RGB", (1, 65_535)))), "1 by 65535 pixels, and it is too long and narrow"),
    "longer": (data_url(header_alone(1, 65_536)), "1 by 65536 pixels; at most"),
    "truncated": (data_url(PNG[: len(PNG) // 2]), "can't be decoded"),
    "truncated JPEG": (data_url(png(NOISE, "JPEG")[:2000]), "can't be decoded"),
    "a header alone": (data_url(header_alone(100, 100)), "can't be decoded"),
    "SVG": (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "SVG is not read here"),
    "SVG by another name": (data_url(b"  <?xml version='1.0'?><svg/>"), "SVG is not read here"),
    "text": (data_url(b"hello"), "no image of a format that is read here (PNG, JPEG, WEBP, GIF)"),
    "TIFF": (data_url(png(pattern(8, 8), "TIFF")), "no image of a format"),
    "BMP": (data_url(png(pattern(8, 8), "BMP")), "no image of a format"),
    "PDF": (data_url(b"%PDF-1.4 " + bytes(100)), "no image of a format"),
    "PostScript": (data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "no image of a format"),
    "nothing": (data_url(b""), "no image of a format"),
    "no base64": ("data:image/png;base64,****", "not base64"),
    "base64 that is cut": (data_url(PNG)[:-3], "not base64"),
    "plain data": ("data:image/png,abc", "must be of data in base64"),
    "a file": ("file:///etc/passwd", "must be of data in base64"),
    "what isn't fetched": ("https://images.example.org/a.png", "this server fetches no images"),
    "a number": (7, "image_url.url must be a string"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_picture_to_decode_is_refused_in_words(reader: BodyReader, name: str) -> None:
    url, words = HOSTILE[name]
    with pytest.raises(RequestError) as found:
        chat(reader, shown(url))
    assert "messages[0].content[0]" in str(found.value)
    assert words in str(found.value)
    assert len(str(found.value)) < 300
    assert found.value.param == "messages"


def test_a_bomb_is_refused_before_anything_is_unpacked(reader: BodyReader, monkeypatch: pytest.MonkeyPatch) -> None:
    def unpacks(image: Image.Image) -> None:
        raise AssertionError("it was unpacked")

    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", unpacks)
    with pytest.raises(RequestError, match="at most 1048576"):
        chat(reader, shown(data_url(header_alone(1025, 1024))))


@pytest.mark.slow
def test_too_many_pictures_and_too_many_pixels_are_refused(spec: ModelSpec, tokenizer: ModelTokenizer) -> None:
    one = png(pattern(8, 8))
    some = BodyReader(spec, tokenizer, RouterConfig(max_images=2))
    assert len(chat(some, asks(one, one)).pictures) == 2
    with pytest.raises(RequestError, match=r"content\[2\]: more than 2 images"):
        chat(some, asks(one, one, one))
    assert spec.pictures is not None
    large = BodyReader(replace(spec, pictures=replace(spec.pictures, longest=4096)), tokenizer, RouterConfig())
    sides = png(Image.new("RGB", (2048, 3072)))
    with pytest.raises(RequestError, match=r"content\[2\]: the images of one request have more than 48 MiB"):
        chat(large, asks(sides, sides, sides))


@pytest.mark.slow
def test_a_photo_of_any_size_is_brought_to_the_size_of_the_processor(tmp_path: Path) -> None:
    """A processor as Qwen3-VL's is published: 2^24 pixels. transformers' own makes the same of the same photo."""
    folder = write_qwen3_vl(tmp_path / "seer")
    spec, most = read_model_spec(folder), 2**24
    assert spec.pictures is not None
    pictures = replace(spec.pictures, patch=16, longest=most, least=65536)
    seeing = BodyReader(
        replace(spec, pictures=pictures, context=2**17), read_model_tokenizer(folder, 1_000_000), RouterConfig()
    )
    photo = Image.fromarray(pattern(36, 54)).resize((8000, 6000))  # 48 megapixels.
    file = png(photo, "JPEG")
    (picture,) = chat(seeing, asks("see", file)).pictures
    height, width = picture.height, picture.width
    assert (height, width) == smart_resize(6000, 8000, factor=32, min_pixels=65536, max_pixels=most)
    assert len(picture.pixels) == 3 * height * width > 32 << 20
    wanted = Image.open(io.BytesIO(file)).resize((width, height), resample=Image.Resampling.BICUBIC)
    assert picture.pixels == wanted.tobytes()


def test_pixels_count_once_for_each_answer(spec: ModelSpec, tokenizer: ModelTokenizer) -> None:
    assert spec.pictures is not None
    pictures = replace(spec.pictures, longest=2048, patch=64)
    large = BodyReader(replace(spec, pictures=pictures), tokenizer, RouterConfig())
    side = png(Image.new("RGB", (2048, 1024)))  # 6 MiB of pixels.
    assert len(chat(large, asks("see", side), n=8).pictures) == 1
    with pytest.raises(RequestError, match="the images of 9 answers have more than 48 MiB") as found:
        chat(large, asks("see", side), n=9)
    assert found.value.param == "n"


def test_a_model_without_pictures_and_one_that_may_take_none_refuse_them(
    spec: ModelSpec, tokenizer: ModelTokenizer
) -> None:
    blind = BodyReader(replace(spec, pictures=None), tokenizer, RouterConfig())
    for each in (blind, BodyReader(spec, tokenizer, RouterConfig(max_images=0))):
        with pytest.raises(RequestError, match=r"messages\[0\]\.content\[1\]: this server takes no images"):
            chat(each, asks("see", PNG))


def test_positions_have_keys_of_the_picture_and_rows_end_as_the_processor_says(
    reader: BodyReader, spec: ModelSpec
) -> None:
    assert spec.pictures is not None
    prompt = chat(reader, asks("a", png(pattern(17, 25)), "b"))
    first, row_end, end = (spec.pictures.token, spec.pictures.row_end, spec.pictures.end)
    tokens = in_vocabulary(prompt.tokens, first)
    begin = tokens.index(first)
    assert tokens[begin : begin + 15] == ([first] * 4 + [row_end]) * 2 + [first] * 4 + [end]
    (picture,) = prompt.pictures
    assert (picture.height, picture.width, picture.count, len(picture.pixels)) == (24, 32, 12, 24 * 32 * 3)
    keys = [token for token in prompt.tokens if token >= PICTURE_KEYS]
    assert len(set(keys)) == 12
    assert all(key < 2**31 for key in keys)
    assert chat(reader, asks("a", png(pattern(17, 25)), "b")) == prompt
    others = chat(reader, asks("a", png(pattern(17, 25, seed=1)), "b")).tokens
    assert not {*keys} & {*others}


def test_another_processor_gives_the_same_pixels_other_keys(spec: ModelSpec) -> None:
    assert spec.pictures is not None
    pixels = bytes(8 * 8 * 3)
    other = replace(spec.pictures, std=(0.5, 0.5, 0.5))
    assert spec.pictures.digest(8, 8, pixels) != other.digest(8, 8, pixels)
    assert spec.pictures.digest(8, 16, bytes(384)) != spec.pictures.digest(16, 8, bytes(384))


def test_a_user_can_not_write_a_placeholder_and_a_system_that_does_is_refused(reader: BodyReader) -> None:
    prompt = chat(reader, asks(f"see {MARKS[0]} ", PNG))
    assert len(prompt.pictures) == 1
    with pytest.raises(RequestError, match="made 2 placeholders of 1 images"):
        chat(reader, {"role": "system", "content": MARKS[0]}, asks("see", PNG))


def test_a_template_that_shows_no_picture_is_refused(spec: ModelSpec, folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    values = json.loads((folder / "tokenizer_config.json").read_text())
    plain = values | {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(plain))
    blind = BodyReader(spec, read_model_tokenizer(tmp_path, 10_000), RouterConfig())
    with pytest.raises(RequestError, match="made 0 placeholders of 1 images"):
        chat(blind, asks("see", PNG))


def test_anthropics_blocks_make_the_prompt_that_openais_parts_make(reader: BodyReader) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    blocks = [{"type": "text", "text": "see"}, {"type": "image", "source": source}]
    body = {"messages": [{"role": "user", "content": blocks}], "max_tokens": 3}
    (prompt,) = reader.messages(json.dumps(body).encode()).prompts
    assert prompt == chat(reader, asks("see", PNG))
    told = reader.count_tokens(json.dumps(body).encode()).body
    assert json.loads(told) == {"input_tokens": len(prompt.tokens)}


def test_a_tools_result_with_an_image_makes_the_prompt_that_openais_parts_make(reader: BodyReader) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    told = [{"type": "text", "text": "it shows "}, {"type": "image", "source": source}]
    blocks = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": told}]},
    ]
    (prompt,) = reader.messages(json.dumps({"messages": blocks, "max_tokens": 3}).encode()).prompts
    assert len(prompt.pictures) == 1
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    chats: list[dict[str, Any]] = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {**asks("it shows ", PNG, role="tool"), "tool_call_id": "a"},
    ]
    assert prompt == chat(reader, *chats)
    assert len(chat(reader, *chats, asks("and ", png(pattern(8, 8)))).pictures) == 2, "what a user says to the result"
    told[1] = {"type": "document"}
    with pytest.raises(RequestError, match=r"messages\[2\]\.content\[0\]\.content .* of type text or image"):
        reader.messages(json.dumps({"messages": blocks, "max_tokens": 3}).encode())


def test_a_responses_image_makes_the_prompt_of_the_same_chat(reader: BodyReader) -> None:
    parts = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": data_url(PNG)}]
    body = {"input": [{"role": "user", "content": parts}]}
    (prompt,) = reader.responses(json.dumps(body).encode()).prompts
    assert prompt == chat(reader, asks("see", PNG))
    wrong = {"input": [{"role": "user", "content": [parts[0], {"type": "input_image", "image_url": data_url(b"x")}]}]}
    with pytest.raises(RequestError, match=r"input\[0\]\.content\[1\]: it is no image") as found:
        reader.responses(json.dumps(wrong).encode())
    assert found.value.param == "input"


def test_tokenize_counts_a_pictures_positions_and_shows_placeholders(reader: BodyReader, spec: ModelSpec) -> None:
    assert spec.pictures is not None
    told = json.loads(reader.tokenize(json.dumps({"messages": [asks("see", PNG)]}).encode()).body)
    assert told["tokens"] == in_vocabulary(chat(reader, asks("see", PNG)).tokens, spec.pictures.token)


def test_a_prompt_with_pictures_is_not_truncated(reader: BodyReader) -> None:
    with pytest.raises(RequestError, match="not truncated"):
        chat(reader, asks("see", PNG), truncate_prompt_tokens=5)


def test_a_reader_process_reads_what_the_router_itself_would(
    reader: BodyReader, spec: ModelSpec, tokenizer: ModelTokenizer
) -> None:
    config = RouterConfig(max_images=3, max_image_pixels=1 << 20)
    there = BodyReader(spec_of(unpacked_setup(setup_frame(spec, config, 100_000))), tokenizer, config)
    body = json.dumps({"messages": [asks("see", PNG, PNG)], "seed": 1}).encode()
    kind, frame = answer(there, FrameKind.CHAT, body)
    assert kind is FrameKind.PREPARED
    assert prepared_of(frame).prompts == reader.chat(body).prompts


def test_no_body_with_a_picture_is_read_between_the_streams_of_others() -> None:
    """A WebP of a hundred bytes may have 2**28 pixels."""
    words = b'{"messages": [{"role": "user", "content": "hello"}]}'
    pictures = [
        json.dumps({"messages": [shown("data:,")]}).encode(),
        b'{"messages": [{"role": "user", "content": [{"type": "\\u0069mage_url"}]}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}',
    ]
    assert read_inline(words, sees=True)
    assert not any(read_inline(body, sees=True) for body in pictures)
    assert not any(read_inline(pictures[0].decode().encode(other), sees=True) for other in ("utf-16", "utf-32"))
    assert read_inline(words, sees=False)
    assert all(read_inline(body, sees=False) for body in pictures if b"\\u" not in body), "the reader decodes none"


def test_a_reader_sees_where_the_model_does_and_images_may_be_sent(spec: ModelSpec, tokenizer: ModelTokenizer) -> None:
    assert BodyReader(spec, tokenizer, RouterConfig()).sees
    assert not BodyReader(spec, tokenizer, RouterConfig(max_images=0)).sees
    assert not BodyReader(replace(spec, pictures=None), tokenizer, RouterConfig()).sees


BLIND: dict[str, tuple[dict[str, Any], str]] = {
    "drafts": ({"engine": {"draft_model": "mtp"}}, "engine.draft_model"),
    "modules": ({"engine": {"models": "transformers"}}, "engine.models"),
    "ranks": ({"prefill": {"tp": 2}}, "prefill.tp=2"),
    "stages": ({"prefill": {"pp": 2}}, "pp=2"),
    "ranks of who computes prompts too": (
        {"decode": {"tp": 2}, "disaggregation": {"mode": "conditional"}}, "decode.tp=2",
    ),
    "short steps": ({"prefill": {"chunk_tokens": 15}, "cache": {"page_tokens": 5}}, "chunk_tokens=15"),
}  # fmt: skip


@pytest.mark.parametrize("name", BLIND)
def test_where_workers_would_refuse_images_the_router_does(tmp_path: Path, name: str) -> None:
    sections, words = BLIND[name]
    spec = read_model_spec(write_gemma3(tmp_path / "gemma3"))
    assert spec.pictures is not None
    config = replace_sections(sections)
    assert words in config.no_images(spec.pictures.whole_positions)
    service = RouterService(spec, config, FakeCluster())
    assert service.spec.pictures is None
    plain = Config()
    assert not plain.no_images(spec.pictures.whole_positions)
    assert RouterService(spec, plain, FakeCluster()).spec.pictures == spec.pictures


def replace_sections(sections: dict[str, dict[str, Any]]) -> Config:
    config = Config()
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in sections.items()})


def test_bodies_may_be_longer_where_the_model_sees(spec: ModelSpec) -> None:
    config = RouterConfig()
    longer = body_limit(config, spec) - body_limit(config, replace(spec, pictures=None))
    assert longer == BODY_BYTES_IMAGES
    assert body_limit(replace(config, max_images=0), spec) == body_limit(config, replace(spec, pictures=None))


def test_a_picture_of_a_turned_camera_is_upright(reader: BodyReader) -> None:
    image = Image.new("RGB", (32, 16))
    ImageDraw.Draw(image).rectangle((0, 0, 15, 15), fill="white")
    exif = image.getexif()
    exif[0x0112] = 6  # Its left side is the top.
    file = io.BytesIO()
    image.save(file, "PNG", exif=exif)
    (picture,) = chat(reader, asks("see", file.getvalue())).pictures
    pixels = np.frombuffer(picture.pixels, np.uint8).reshape(picture.height, picture.width, 3)
    assert pixels.shape == (32, 16, 3)
    assert pixels[:8].min() > 250
    assert pixels[-8:].max() < 5


WRONG: dict[str, tuple[str, dict[str, Any] | None, str]] = {
    "none": ("preprocessor_config.json", None, "no preprocessor_config.json"),
    "not resized": ("preprocessor_config.json", {"do_resize": False}, "do_resize is false"),
    "another size": ("preprocessor_config.json", {"size": {"height": 8, "width": 8}}, "longest_edge"),
    "two means": ("preprocessor_config.json", {"image_mean": [0.5, 0.5]}, "image_mean must be three numbers"),
    "other patches": ("processor_config.json", {"patch_size": 8}, "not those of config.json"),
    "no such token": ("processor_config.json", {"image_token": "[NONE]"}, "no token [NONE]"),
    "a layer before": ("config.json", {"vision_feature_layer": -2}, "vision_feature_layer"),
    "another token": ("config.json", {"image_token_index": 5}, "is not the id"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_checkpoint_of_which_something_is_not_known_is_served_as_text_alone(
    folder: Path, tmp_path: Path, name: str
) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    file, change, words = WRONG[name]
    (tmp_path / file).unlink()
    if change is not None:
        (tmp_path / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
    spec = read_model_spec(tmp_path)
    assert spec.pictures is None
    assert any("images are refused" in warning and words in warning for warning in spec.warnings), spec.warnings


def test_windows_that_end_within_a_picture_are_served_as_text_alone(tmp_path: Path) -> None:
    """Its positions see each other through a window, too, which windows here don't know."""
    folder = write_gemma3(tmp_path / "gemma3")
    config = json.loads((folder / "config.json").read_text())
    for window in (16, 15):
        config["text_config"]["sliding_window"] = window
        (folder / "config.json").write_text(json.dumps(config))
        spec = read_model_spec(folder)
        assert (spec.pictures is None) == (window < 16)
    assert any("sliding_window 15 is less than the 16" in warning for warning in spec.warnings), spec.warnings


def test_a_processor_as_transformers_writes_it_now_is_read_as_well(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        if "processor" not in path.name:
            (tmp_path / path.name).symlink_to(path)
    outer, inner = (json.loads((folder / f"{name}_config.json").read_text()) for name in ("processor", "preprocessor"))
    (tmp_path / "processor_config.json").write_text(json.dumps(outer | {"image_processor": inner}))
    wanted, _ = read_picture_spec(folder, "Mistral3ForConditionalGeneration")
    found, _ = read_picture_spec(tmp_path, "Mistral3ForConditionalGeneration")
    assert isinstance(found, PictureSpec)
    assert found == wanted
    assert found.unit == UNIT
