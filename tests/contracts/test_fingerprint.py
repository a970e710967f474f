"""Fingerprints: any part that differs keeps two workers apart, and numerics do unless both compute fast."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from twinpool.contracts.messages.fingerprint import (
    REMEDIES,
    Fingerprint,
    binding_class,
    differing,
    handover_class,
    mismatch,
    numerics_class,
)

EXACT = Fingerprint(4, "layout", numerics_class("invariant", "cpu"), "weights")
FAST = replace(EXACT, numerics=numerics_class("fast", "cpu"))
OTHERS: dict[str, Any] = {"protocol": 5, "layout": "other", "weights": "other"}


@pytest.mark.parametrize("ours", [EXACT, FAST])
@pytest.mark.parametrize("part", OTHERS)
def test_what_differs_is_named_with_both_sides_and_a_remedy(ours: Fingerprint, part: str) -> None:
    theirs = replace(ours, **{part: OTHERS[part]})
    assert differing(ours, theirs) == differing(theirs, ours) == (part,)
    said = mismatch(ours, theirs, "p-0", "d-1")
    assert said is not None
    for word in ("p-0", "d-1", REMEDIES[part], str(getattr(ours, part)), str(OTHERS[part])):
        assert word in said
    assert handover_class(ours) != handover_class(theirs)


def test_numerics_may_differ_only_where_both_compute_fast() -> None:
    elsewhere = {one: replace(one, numerics=one.numerics.replace("cpu", "gpu")) for one in (EXACT, FAST)}
    assert differing(FAST, elsewhere[FAST]) == ()
    assert differing(EXACT, elsewhere[EXACT]) == ("numerics",)
    assert differing(EXACT, FAST) == differing(FAST, EXACT) == ("numerics",)
    assert mismatch(FAST, elsewhere[FAST], "a", "b") is None
    assert binding_class(None) == ""
    assert binding_class(FAST) == binding_class(elsewhere[FAST]) == FAST.weights
    assert binding_class(EXACT) == f"{EXACT.numerics} {EXACT.weights}"
    assert binding_class(replace(EXACT, weights="others")) != binding_class(EXACT)
    assert handover_class(FAST) == handover_class(elsewhere[FAST]) != handover_class(EXACT)
    assert handover_class(None) == ""


def test_all_that_differs_is_named() -> None:
    assert set(differing(EXACT, replace(FAST, **OTHERS))) == {*OTHERS, "numerics"}
