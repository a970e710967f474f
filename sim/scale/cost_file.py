"""The file of measured costs: what `twinpool plan --measure` writes, and plans are made of."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinpool.contracts.errors import ConfigError
from twinpool.contracts.outside_data import read_json
from twinpool.sim.fabric.step_costs import StepCosts
from twinpool.sim.scale.cluster_plan import DecodePool, PrefillPool
from twinpool.sim.scale.cost_fit import BatchProbe, PromptProbe

FORMAT = 1
DOUBTFUL = 0.15
"""A mean relative error of the fit beyond which plans aren't to be believed."""


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """The costs of a model's steps on a machine, and the sizes of the workers that they were measured on."""

    model: str
    machine: str
    measured_at: str
    """In ISO 8601."""
    costs: StepCosts
    chunk_tokens: int
    """Of a prefill step (`prefill.chunk_tokens`)."""
    page_tokens: int
    max_rows: int
    """Of a decode step."""
    prefill_tokens: int
    """Positions that a prefill worker's pools hold."""
    decode_tokens: int
    position_bytes: int = 0
    """Bytes of a position in a pool of whole contexts; 0: unknown."""
    prompt_error: float = 0.0
    batch_error: float = 0.0
    """How far the costs are from the probes, as means of relative errors."""
    prompts: tuple[PromptProbe, ...] = ()
    batches: tuple[BatchProbe, ...] = ()

    @property
    def doubtful(self) -> bool:
        """Whether the costs explain what was measured too badly to plan by."""
        return max(self.prompt_error, self.batch_error) > DOUBTFUL

    def prefill_pool(self, workers: int) -> PrefillPool:
        return PrefillPool(workers, device_tokens=self.prefill_tokens, chunk_tokens=self.chunk_tokens)

    def decode_pool(self, workers: int) -> DecodePool:
        return DecodePool(workers, device_tokens=self.decode_tokens, max_rows=self.max_rows)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"format": FORMAT} | dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")


def read_costs(path: Path) -> MeasuredCosts:
    """Raises `ConfigError` for a file that isn't there, or holds something else."""
    try:
        tree: dict[str, Any] = read_json(path.read_text(encoding="utf-8"))
        if tree.pop("format") != FORMAT:
            raise ValueError("it is of another build's form")
        tree["costs"] = StepCosts(**tree["costs"])
        tree["prompts"] = tuple(PromptProbe(**one) for one in tree["prompts"])
        tree["batches"] = tuple(BatchProbe(**one) for one in tree["batches"])
        return MeasuredCosts(**tree)
    except OSError as error:
        raise ConfigError(
            f"can't read the costs {path} ({error.strerror}): twinpool plan --measure makes them"
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} holds no measured costs ({error}): twinpool plan --measure makes them") from None
