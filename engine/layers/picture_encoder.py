"""The picture encoder of a worker: it computes the pictures of prompts with the model's tower, between steps, and keeps
what stands at their positions.

A step takes what is there. So who plans steps asks for the pictures of the next ones first, one slice of a tower after
the other (`PictureEncoder.compute`), and leaves out what isn't computed yet: nobody else waits for a large picture.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from twinpool.cache.device.device_copies import to_device
from twinpool.cache.device.device_port import Device, DeviceOp, DeviceStream
from twinpool.contracts.messages.router_commands import Picture
from twinpool.engine.attention.attention_plan import PictureSpan
from twinpool.engine.layers.picture_tower import PictureTower, Slices, whole
from twinpool.engine.native.current_kernels import LayerKernels, using
from twinpool.engine.tensors.row_exact_linear import Numerics

KEPT_BYTES = 256 * 1024**2
"""Of what a tower has computed, kept for chunks and prompts to come. What prompts in work need may be more, by
`AT_ONCE` pictures."""
AT_ONCE = 2
"""Pictures that may be begun and not finished: the one that has waited longest, and the smallest of the others."""
_SLICE_OP = DeviceOp("picture", DeviceStream.COMPUTE)


class PlacedRows(NamedTuple):
    """Rows of a picture in a row of a step: those from `first` on of what its tower computes stand at the places `at`,
    counted from the row's first token."""

    picture: Picture
    digest: bytes
    first: int
    at: Sequence[int]


class StepPictures(NamedTuple):
    """The pictures of a step."""

    places_n: Tensor
    """[n] int64: their places among the step's tokens."""
    rows_nh: Tensor
    """What stands there, as `PictureTower` gives it."""
    spans: Sequence[PictureSpan]
    """Where positions of a picture see each other."""


class PictureEncoder:
    """What a worker's tower computes, between its steps, and keeps by the pictures' digests: the latest ones, as many
    bytes as there may be, and what is needed now."""

    def __init__(
        self, tower: PictureTower, limit: int, numerics: Numerics, kernels: LayerKernels | None, device: Device
    ) -> None:
        self.tower = tower
        self._numerics, self._kernels, self._device = numerics, kernels, device
        self._limit, self._nbytes = limit, 0
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._unused = set[bytes]()
        """Of those that are kept, the ones of which no step had anything yet."""
        self._begun: dict[bytes, Slices] = {}
        self.slices = 0
        """Slices that have ended."""
        self.counters = {"pictures_computed": 0.0, "pictures_reused": 0.0}

    def has(self, digest: bytes) -> bool:
        """Whether a picture is computed."""
        return digest in self._kept

    def began(self, digest: bytes) -> bool:
        """Whether a picture is computed, or some of it."""
        return digest in self._kept or digest in self._begun

    def compute(self, wanted: Sequence[PlacedRows], needed: Collection[bytes]) -> bool:
        """Compute one slice of a picture in `wanted`, none of which is computed; returns whether there was one, and
        room for what it gives. `needed`: the digests of pictures that are computed and go into steps now.

        Slices of the picture that has waited longest, the first, and of the smallest of the others take turns, so that
        a small one doesn't wait for a large one. What loses its turn to a smaller one begins anew, later.
        """
        chosen = list({one.digest: one.picture for one in wanted}.items())
        chosen[1:] = sorted(chosen[1:], key=lambda one: one[1].count)[: AT_ONCE - 1]
        for digest in self._begun.keys() - dict(chosen).keys():
            del self._begun[digest]
        if sum(self._kept[one].nbytes for one in needed) > self._limit:  # None is begun, and what was goes on.
            chosen = [one for one in chosen if one[0] in self._begun]
        if not chosen:
            return False
        digest, picture = chosen[self.slices % len(chosen)]
        self._device.submit(_SLICE_OP, lambda: self._advance(digest, picture, needed)).wait()
        return True

    def placed(self, rows: Iterable[tuple[int, Sequence[PlacedRows]]]) -> StepPictures | None:
        """What stands in a step in place of embeddings; None for nothing. `rows`: the place of the first token of each
        row of the step, and its parts of pictures."""
        places, found, spans = list[int](), list[Tensor](), list[PictureSpan]()
        for number, (first, parts) in enumerate(rows):
            for picture, digest, begin, at in parts:
                places += [first + place for place in at]
                found.append(self._rows(picture, digest)[begin : begin + len(at)])
                if self.tower.spec.whole:
                    assert begin + len(at) == picture.count, "a step computes a picture to its end"
                    spans.append(PictureSpan(number, first + at[0], at[0], len(at)))
        return StepPictures(to_device(places, self.tower.device), torch.cat(found), spans) if found else None

    def _begin(self, picture: Picture) -> Slices:
        pixels = torch.frombuffer(bytearray(picture.pixels), dtype=torch.uint8)
        device = self.tower.device
        return self.tower(pixels.view(picture.height, picture.width, 3).to(device), self._numerics)

    @torch.inference_mode()
    def _advance(self, digest: bytes, picture: Picture, needed: Collection[bytes]) -> None:
        slices = self._begun.pop(digest, None) or self._begin(picture)
        try:
            with using(self._kernels):
                next(slices)
            self._begun[digest] = slices  # One that has failed is over, and the picture begins anew.
        except StopIteration as end:
            self._keep(digest, end.value, needed)
        self.slices += 1

    def _keep(self, digest: bytes, rows: Tensor, needed: Collection[bytes]) -> None:
        self.counters["pictures_computed"] += 1
        self._unused.add(digest)
        self._kept[digest] = rows
        self._nbytes += rows.nbytes
        for old in [one for one in self._kept if one != digest and one not in needed]:
            if self._nbytes <= self._limit:
                return
            self._nbytes -= self._kept.pop(old).nbytes
            self._unused.discard(old)

    def _rows(self, picture: Picture, digest: bytes) -> Tensor:
        """All rows of a picture, [count, hidden], which are computed here for who didn't ask for them before."""
        if digest not in self._kept:
            with using(self._kernels):
                self._keep(digest, whole(self._begin(picture)), ())
        if digest in self._unused:
            self._unused.remove(digest)
        else:
            self.counters["pictures_reused"] += 1
        self._kept.move_to_end(digest)
        return self._kept[digest]
