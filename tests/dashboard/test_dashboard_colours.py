"""The page's colours: every one that text has can be read on every ground that it is on, by light and by dark."""

from __future__ import annotations

import itertools
import math
import re

import pytest

from twinpool.router.api.admin_status import FOLDER
from twinpool.router.records import make_record

STYLE = (FOLDER / "style.css").read_text()
MIN = 4.5
"""The contrast that WCAG 2.2 asks for of text (AA)."""
TEXTS = ("ink", "soft", "faint", "accent-ink", "warn", "bad")
GROUNDS = ("paper", "card")
ON_ITS_OWN = {"warn": "warn-wash", "bad": "bad-wash", "accent-ink": "wash"}


def scheme(dark: bool) -> dict[str, str]:
    blocks = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    assert len(blocks) == 2, "light, then dark"
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", blocks[0]))
    return colours | (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", blocks[1])) if dark else {})


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read(dark: bool) -> None:
    colours = scheme(dark)
    pairs = [(text, ground) for text in TEXTS for ground in GROUNDS] + list(ON_ITS_OWN.items())
    found = {pair: round(contrast(colours[pair[0]], colours[pair[1]]), 2) for pair in pairs}
    assert {pair: value for pair, value in found.items() if value < MIN} == {}


@pytest.mark.parametrize("dark", [False, True])
def test_lines_and_bars_stand_out_from_their_ground(dark: bool) -> None:
    colours = scheme(dark)
    assert contrast(colours["accent"], colours["card"]) >= 3
    assert contrast(colours["accent"], colours["hair"]) >= 3


PARTS = {
    "tokenise", "queue", "prefill_queue", "prefill", "decode_queue", "handover", "transfer", "decode", "retracted",
    "move", "answer",
}  # fmt: skip
"""The spans of a request (`router.records.make_record`)."""
APART = 0.055
"""The least distance of two parts in OKLab: about three times what an eye can just tell apart side by side."""


def oklab(colour: str) -> tuple[float, float, float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    long = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    middle = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    short = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    )


@pytest.mark.parametrize("dark", [False, True])
def test_the_parts_of_a_request_are_told_apart_by_their_hues(dark: bool) -> None:
    colours = scheme(dark)
    parts = {name.removeprefix("p-"): colour for name, colour in colours.items() if name.startswith("p-")}
    assert set(parts) == PARTS
    close = [
        (one, other)
        for one, other in itertools.combinations(sorted(parts), 2)
        if math.dist(oklab(parts[one]), oklab(parts[other])) < APART
    ]
    assert close == []
    assert {name for name, colour in parts.items() if contrast(colour, colours["card"]) < 3} == set()


def test_the_page_has_a_word_for_each_part_in_the_order_of_a_requests_life() -> None:
    script = (FOLDER / "waterfall.js").read_text()
    named = re.findall(r"(\w+): \[\"", script[script.index("const SPANS") : script.index("const ORDER")])
    told = re.findall(r"^``(\w+)``", make_record.__doc__ or "", re.MULTILINE)
    assert set(named) == PARTS == {*told, "transfer"}
    assert [name for name in named if name in told] == told


def test_the_oracle_knows_the_standards_own_examples() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
