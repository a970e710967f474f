"""Towers of models that see, against transformers': pixels bit for bit, rows as near as float32 is."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.seeing_models import SEEN, WRITERS, SeeingOracle, asks, pattern, png, write_qwen3_vl
from twinpool.contracts.block_hash import PICTURE_KEYS
from twinpool.contracts.checkpoint.model_spec import ModelSpec, read_model_spec
from twinpool.contracts.checkpoint.picture_spec import PictureSpec, UnfitPicture, read_picture_spec
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.errors import RequestError
from twinpool.contracts.messages.router_commands import Picture
from twinpool.engine.layers.picture_tower import Colours, whole
from twinpool.engine.models.registry import unchecked_model
from twinpool.engine.runner.batch import TurnedPlaces
from twinpool.engine.tensors.row_exact_linear import FAST
from twinpool.engine.tensors.weight_loader import Weights
from twinpool.router.text.tokenizer import read_model_tokenizer
from twinpool.router.tokenizer_pool.prepare_request import BodyReader

SIZES = [(31, 17), (1, 9), (200, 9), (7, 63), (150, 90), (16, 16), (40, 64), (64, 64)]


class Kept:
    """A checkpoint, transformers' model of it, and its tower here."""

    def __init__(self, folder: Path) -> None:
        self.oracle = SeeingOracle(folder)
        self.spec: ModelSpec = read_model_spec(folder)
        weights = Weights(self.spec, torch.float32, torch.device("cpu"))
        tower = unchecked_model(self.spec).build(weights).tower
        assert tower is not None, self.spec.warnings
        self.tower, self._reader = tower, BodyReader(
            self.spec, read_model_tokenizer(folder, 100_000), RouterConfig()
        )  # fmt: skip

    def picture(self, height: int, width: int) -> tuple[Picture, dict[str, Any]]:
        """A picture as it is sent to workers, and what transformers' model is given of it."""
        messages = [asks("see ", png(pattern(height, width)))]
        (picture,) = self._reader.chat(json.dumps({"messages": messages}).encode()).prompts[0].pictures
        return picture, self.oracle.inputs(messages)

    def grid(self, picture: Picture) -> torch.Tensor:
        pixels = torch.frombuffer(bytearray(picture.pixels), dtype=torch.uint8)
        return pixels.view(picture.height, picture.width, 3)


@pytest.fixture(scope="module", params=SEEN)
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    folder = tmp_path_factory.mktemp("towers") / "model"
    family, _, experts = request.param.partition(" with ")
    made = Kept(WRITERS[family](folder, experts=True) if experts else WRITERS[family](folder))
    assert made.spec.architecture == SEEN[request.param]
    return made


def processed(spec: PictureSpec, picture: Picture, inputs: dict[str, Any]) -> torch.Tensor:
    """The numbers that transformers' processor made of a picture, [3, height, width]."""
    values: torch.Tensor = inputs["pixel_values"]
    if spec.turned:
        down, across, patch, merge = picture.height // spec.patch, picture.width // spec.patch, spec.patch, spec.merge
        blocks = values.view(down // merge, across // merge, merge, merge, 3, 2, patch, patch)
        assert (blocks[..., 0, :, :] == blocks[..., 1, :, :]).all(), "two equal frames"
        blocks = blocks[..., 0, :, :].permute(4, 0, 2, 5, 1, 3, 6)
        return blocks.reshape(3, picture.height, picture.width)
    if spec.family == "gemma4":  # Patch by patch, of each pixel its colours, and padding.
        down, across, patch = picture.height // spec.patch, picture.width // spec.patch, spec.patch
        blocks = values[0, : down * across].view(down, across, patch, patch, 3)
        return blocks.permute(4, 0, 2, 1, 3).reshape(3, picture.height, picture.width)
    return values[0][:, : picture.height, : picture.width]


@pytest.mark.slow
def test_pixels_are_those_of_transformers_processor_bit_for_bit(kept: Kept) -> None:
    spec = kept.spec.pictures
    assert spec is not None
    for height, width in (*SIZES, (5, 1000), (1, 300)):
        try:
            picture, inputs = kept.picture(height, width)
        except RequestError:
            with pytest.raises(UnfitPicture):
                spec.size(height, width)
            continue
        x_tk, down, across = Colours.of(spec, torch.device("cpu")).patches(kept.grid(picture))
        size = spec.patch
        mine = x_tk.view(down, across, 3, size, size).permute(2, 0, 3, 1, 4).reshape(3, picture.height, picture.width)
        assert torch.equal(mine, processed(spec, picture, inputs)), (height, width)


@pytest.mark.slow
def test_rows_are_those_of_transformers_tower(kept: Kept) -> None:
    for height, width in SIZES:
        picture, inputs = kept.picture(height, width)
        names = ("pixel_values", "image_sizes", "image_grid_thw", "image_position_ids")
        with torch.inference_mode():
            seen = kept.oracle.model.get_image_features(**{name: inputs[name] for name in names if name in inputs})
            mine = whole(kept.tower(kept.grid(picture), FAST))
        wanted = torch.cat([*seen.pooler_output], dim=0)
        stacked = [torch.cat([*each]) for each in getattr(seen, "deepstack_features", None) or ()]
        wanted = torch.cat((wanted.view(picture.count, -1), *stacked), dim=1)
        torch.testing.assert_close(mine, wanted, rtol=2e-4, atol=2e-4)


def test_positions_are_turned_as_transformers_counts_them(tmp_path: Path) -> None:
    oracle = SeeingOracle(write_qwen3_vl(tmp_path / "model"))
    files = [png(pattern(*size)) for size in ((24, 24), (60, 60), (8, 64), (64, 8))]
    messages = [asks("one ", files[0], " two ", files[1], files[2], "!"), asks("and", files[3], "?")]
    inputs = oracle.inputs(messages)
    index, _ = oracle.model.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"]
    )
    wanted = index[:, 0]
    token = oracle.model.config.image_token_id
    tokens = [PICTURE_KEYS if one == token else one for one in inputs["input_ids"][0].tolist()]
    pictures = [
        Picture(token, int(down) * 4, int(across) * 4, int(down) * int(across) // 4, across=int(across) // 2)
        for _, down, across in inputs["image_grid_thw"]
    ]
    places = TurnedPlaces.of(tokens, pictures)
    assert places is not None
    assert np.array_equal(places.at(0, len(tokens)), wanted.numpy())
    for start in range(len(tokens)):
        assert np.array_equal(places.at(start, 5)[:, : len(tokens) - start], wanted.numpy()[:, start : start + 5])
    behind = int(wanted.max()) + 1
    assert places.at(len(tokens) + 10, 1).tolist() == [[behind + 10]] * 3


def test_a_picture_of_half_a_unit_is_rounded_to_an_even_number_of_them(tmp_path: Path) -> None:
    spec = read_model_spec(write_qwen3_vl(tmp_path / "model")).pictures
    assert spec is not None
    assert spec.size(20, 28) == (16, 32)
    assert spec.size(8, 8) == (16, 16), "at least 256 pixels"
    assert spec.size(500, 400) == (64, 56), "at most 4096"
    with pytest.raises(UnfitPicture, match="200 times"):
        spec.size(1, 201)


WRONG: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "crops": ("gemma3", "preprocessor_config.json", {"do_pan_and_scan": True}, "do_pan_and_scan"),
    "another side": ("gemma3", "preprocessor_config.json", {"size": {"height": 16, "width": 16}}, "32 pixels"),
    "other positions": ("gemma3", "processor_config.json", {"image_seq_length": 64}, "image_seq_length"),
    "no square": ("gemma3", "config.json", {"mm_tokens_per_image": 15}, "image_seq_length"),
    "another token": ("gemma3", "config.json", {"image_token_index": 7}, "image_token_index"),
    "other colours": ("gemma4", "preprocessor_config.json", {"do_normalize": True}, "do_normalize is true"),
    "other pools": ("gemma4", "preprocessor_config.json", {"pooling_kernel_size": 2}, "pooling_kernel_size"),
    "too many positions": ("gemma4", "preprocessor_config.json", {"max_soft_tokens": 140}, "position_embedding_size"),
    "one frame": ("qwen3-vl", "preprocessor_config.json", {"temporal_patch_size": 1}, "temporal_patch_size"),
    "other patches": ("qwen2.5-vl", "preprocessor_config.json", {"patch_size": 8}, "patch_size"),
    "no sizes": ("qwen3-vl", "preprocessor_config.json", {"size": {"longest_edge": 0}}, "longest_edge"),
    "another pad": ("qwen2.5-vl", "config.json", {"image_token_id": 7}, "image_token_id"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_known_of_a_processor_is_served_as_text_alone(tmp_path: Path, name: str) -> None:
    family, file, change, words = WRONG[name]
    folder = WRITERS[family](tmp_path / "model")
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    found, why = read_picture_spec(folder, architecture)
    assert found is None
    assert words in why


def test_a_picture_of_gemma_is_a_square_whatever_it_was(tmp_path: Path) -> None:
    kept = Kept(WRITERS["gemma3"](tmp_path / "model"))
    picture, _ = kept.picture(150, 90)
    resized = Image.open(io.BytesIO(png(pattern(150, 90)))).resize((32, 32), resample=Image.Resampling.BILINEAR)
    assert picture.pixels == resized.tobytes()
    assert (picture.count, picture.whole, picture.across) == (16, True, 0)
