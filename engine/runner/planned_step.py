"""A planned step: what the host has worked out of a step before the device runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from twinpool.engine.attention.attention_plan import StepShape
from twinpool.engine.runner.device_block_tables import PlannedTables
from twinpool.engine.runner.sampling.token_history import PlannedHistories


@dataclass(frozen=True, slots=True)
class PlannedSlots:
    """The slots of one state pool that a planned step reads and writes, one a sequence, with their epochs."""

    slots: list[list[int]]
    """[B][1]"""
    epochs: list[list[int]]
    """[B][1]"""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The shape of a step, and what it needs of every pool, by name."""

    shape: StepShape
    tables: Mapping[str, PlannedTables]
    """Of full and window pools."""
    slots: Mapping[str, PlannedSlots]
    """Of state pools."""
    histories: PlannedHistories | None
    """Of rows that draw by a history; None where none does."""
