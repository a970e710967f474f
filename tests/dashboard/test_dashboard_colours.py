"""The page's colours: every one that text has can be read on every ground that it is on, by light and by dark."""

from __future__ import annotations

import re

import pytest

from router.api.admin_dashboard import FOLDER

STYLE = (FOLDER / "style.css").read_text()
LEAST = 4.5
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
    assert {pair: value for pair, value in found.items() if value < LEAST} == {}


@pytest.mark.parametrize("dark", [False, True])
def test_lines_and_bars_stand_out_from_their_ground(dark: bool) -> None:
    colours = scheme(dark)
    assert contrast(colours["accent"], colours["card"]) >= 3
    assert contrast(colours["accent"], colours["hair"]) >= 3


def test_the_oracle_knows_the_standards_own_examples() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
