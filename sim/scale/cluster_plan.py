"""What the fast simulator is asked: the pools, the costs of their steps, and when an answer is good enough.

Costs are a model's own where they were measured: fitted to what a client saw of an idle cluster, and kept in a file.
Each measured time is a sum of costs with known coefficients: a first token takes the steps of its prompt and two
messages, a token of a batch one step. The sums are solved for the costs by least squares of relative errors, with costs
of at least 0: of so few unknowns every subset is tried, and the best that needs no negative one is taken.

`twinpool plan --measure` writes the file (`MeasuredCosts`), and plans are made of it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.outside_data import read_json
from twinpool.sim.fabric.virtual_time import StepCosts, pairs_of

_SLO_FIELDS = {"ttft": "ttft_s", "itl": "tpot_s"}


@dataclass(frozen=True, slots=True)
class PrefillPool:
    """The prefill workers, all alike. Tokens are those of one worker."""

    workers: int
    device_tokens: int = 1 << 19
    """Its prefix cache on the device."""
    host_tokens: int = 0
    """And in host memory; 0: none."""
    chunk_tokens: int = 2048
    """Prompt tokens of a step."""
    short_share: float = 0.25
    """The part of them that goes first to prompts with less left than the oldest (`prefill.short_share`)."""
    max_running: int = 32
    """Prompts that are computed beside each other."""

    def __post_init__(self) -> None:
        _at_least(
            self, {"workers": 1, "device_tokens": 1, "host_tokens": 0, "chunk_tokens": 1, "max_running": 1}, "prefill"
        )
        if not 0 <= self.short_share <= 1:
            raise ConfigError(f"prefill short_share is a share, from 0 to 1; got {self.short_share}")


@dataclass(frozen=True, slots=True)
class DecodePool:
    """The decode workers, all alike."""

    workers: int
    device_tokens: int = 1 << 19
    """Positions of which a worker can hold the state."""
    max_rows: int = 256
    """Requests of a step."""
    output_length_quantile: float = 0.75
    """As `decode.output_length_quantile`."""
    first_length: int = 512
    """The expected length of an answer before any has ended, in tokens."""

    def __post_init__(self) -> None:
        _at_least(self, {"workers": 1, "device_tokens": 1, "max_rows": 1, "first_length": 1}, "decode")


@dataclass(frozen=True, slots=True)
class AnswerTarget:
    """What an answer must keep to be good."""

    ttft_s: float = 5.0
    """Seconds to its first token."""
    tpot_s: float = 0.1
    """Seconds from a token to the next, on its average."""

    def __post_init__(self) -> None:
        if not (self.ttft_s > 0 and self.tpot_s > 0):
            raise ConfigError(f"a latency target must be above 0 seconds, got {self.ttft_s:g} and {self.tpot_s:g}")

    @classmethod
    def read(cls, text: str) -> AnswerTarget:
        """Read ``ttft=1.0,itl=0.05``, each in seconds, as `--slo` takes it; what is left out has its default. Raises
        `ConfigError`."""
        given: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            try:
                given[_SLO_FIELDS[name.strip()]] = float(value)
            except (KeyError, ValueError):
                raise ConfigError(
                    f"--slo takes ttft=SECONDS,itl=SECONDS, such as ttft=1.0,itl=0.05; got {text!r}"
                ) from None
        return cls(**given)

    def __str__(self) -> str:
        return f"ttft={self.ttft_s:g},itl={self.tpot_s:g}"


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """A cluster that is to be simulated."""

    prefill: PrefillPool
    decode: DecodePool
    costs: StepCosts = field(default_factory=StepCosts)
    target: AnswerTarget = field(default_factory=AnswerTarget)
    position_bytes: int = 0
    """Bytes of the state of a position, in what workers tell of what they send; 0: they tell nothing of it."""
    block_tokens: int = 512
    """Tokens of a block of the prefix caches and of the index, of which `chunk_tokens` is a multiple or a part."""
    routers: int = 1
    refuse_late: bool = False
    """Whether routers refuse a prompt whose first token is predicted to come later than `target` says."""
    places: int = 0
    """Workers that nodes have room for; 0: as many as the bounds of autoscaling allow."""
    config: Config = field(default_factory=lambda: config_from_dict({}))
    """What the routers, the controller and the autoscaler are configured with."""

    def __post_init__(self) -> None:
        """Raises `ConfigError` for a plan that can't run."""
        _at_least(self, {"position_bytes": 0, "block_tokens": 1, "routers": 1, "places": 0}, "plan")
        if self.places and self.places < self.prefill.workers + self.decode.workers:
            raise ConfigError(f"places={self.places} is less than the workers that there are at first")
        if self.prefill.device_tokens < self.block_tokens:
            raise ConfigError(f"a prefill worker's cache must hold a block of {self.block_tokens} tokens")


def _at_least(plan: object, least: dict[str, int], what: str) -> None:
    for name, bound in least.items():
        if getattr(plan, name) < bound:
            raise ConfigError(f"{what} {name} must be {bound} or more, got {getattr(plan, name)}")


MIN_BASE_S = 1e-5
"""Seconds of the quickest step that is believed."""


@dataclass(frozen=True, slots=True)
class PromptProbe:
    """A prompt that was computed alone, or several alike that came at once; nothing of them was held before."""

    tokens: int
    """Of each."""
    ttft_s: float
    """To the first token; of several, to the last one's."""
    gap_s: float = 0.0
    """From its first token to the second: the hand-over, and a step of decode. Of one alone."""
    prompts: int = 1
    """How many came at once. Of several that fill a step each, steps add up and what a request takes besides doesn't:
    by that the two are told apart."""


@dataclass(frozen=True, slots=True)
class BatchProbe:
    """Answers that ran beside each other, and no prompt with them."""

    rows: int
    context: int
    """Positions that a row attended to, on average."""
    token_s: float
    """From a token of an answer to its next, on average."""


@dataclass(frozen=True, slots=True)
class CostFit:
    """Costs, and how far they are from what they were made of."""

    costs: StepCosts
    prompt_error: float
    """The mean of relative errors of first tokens."""
    batch_error: float
    """Of tokens in batches."""


def fit_costs(
    prompts: Sequence[PromptProbe], batches: Sequence[BatchProbe], chunk_tokens: int, draft_rows: int = 0
) -> CostFit:
    """The costs that explain the probes best. `chunk_tokens`: of a prefill step. `draft_rows`: rows up to which decode
    makes drafts. Raises `ConfigError` for too few probes."""
    plain = [probe for probe in batches if probe.rows > draft_rows]
    if len({probe.tokens for probe in prompts}) < 3 or len({probe.rows for probe in plain}) < 2:
        raise ConfigError(
            "costs need prompts of three lengths, and batches of two sizes that are large enough to have no drafts; "
            "the machine may have been too busy for answers to run beside each other: measure again"
        )
    decode, batch_error = _solved([_of_batch(probe) for probe in plain], [probe.token_s for probe in plain])
    drafted = [probe for probe in batches if probe.rows <= draft_rows]
    parts = [probe.token_s / max(MIN_BASE_S, float(np.dot(decode, _of_batch(probe)))) for probe in drafted]
    gain = min(1.0, float(np.median(parts))) if parts else 1.0
    if parts:
        off = [abs(gain / part - 1) for part in parts]
        batch_error = (batch_error * len(plain) + sum(off)) / len(batches)
    prompt_rows = [_of_prompts(probe, chunk_tokens) for probe in prompts]
    prefill, prompt_error = _solved(prompt_rows, [probe.ttft_s for probe in prompts])
    alone = [probe for probe in prompts if probe.prompts == 1]
    steps = [float(np.dot(decode, (1.0, 1, probe.tokens))) for probe in alone]
    over = [max(MIN_BASE_S, probe.gap_s - step) for probe, step in zip(alone, steps, strict=True)]
    handover, _ = _solved([(1.0, probe.tokens) for probe in alone], over)
    # What a first token takes besides its steps is two messages in the model: from the router, and back to it.
    costs = StepCosts(
        prefill_base_s=max(MIN_BASE_S, prefill[1]),
        prefill_token_s=prefill[2],
        prefill_pair_s=prefill[3],
        decode_base_s=max(MIN_BASE_S, decode[0]),
        decode_row_s=decode[1],
        decode_context_s=decode[2],
        draft_rows=draft_rows if parts else 0,
        draft_gain=gain,
        handover_base_s=handover[0],
        handover_token_s=handover[1],
        message_s=prefill[0] / 2,
    )
    return CostFit(costs, prompt_error, batch_error)


def _of_prompts(probe: PromptProbe, chunk_tokens: int) -> tuple[float, int, int, float]:
    """Coefficients of the costs of first tokens: what isn't of steps, then base, token and pair of prefill's steps."""
    count = probe.prompts
    return 1.0, count * -(-probe.tokens // chunk_tokens), count * probe.tokens, count * pairs_of(0, probe.tokens)


def _of_batch(probe: BatchProbe) -> tuple[float, int, int]:
    """Coefficients of the costs of a decode step: base, row, context."""
    return 1.0, probe.rows, probe.rows * probe.context


def _solved(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], float]:
    """Coefficients of at least 0 for which `rows` come closest to `seconds`, and the mean of relative errors."""
    weights = 1 / np.maximum(np.array(seconds), MIN_BASE_S)
    matrix: NDArray[np.float64] = np.array(rows, np.float64) * weights[:, None]
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-30)
    wanted = np.array(seconds) * weights
    width, best, least = matrix.shape[1], np.zeros(matrix.shape[1]), float("inf")
    for count in range(1, width + 1):
        for chosen in combinations(range(width), count):
            columns = list(chosen)
            found = np.linalg.lstsq(matrix[:, columns] / scale[columns], wanted, rcond=None)[0]
            if (found < 0).any():
                continue
            left = float(np.square(matrix[:, columns] / scale[columns] @ found - wanted).sum())
            if left < least - 1e-12:
                least, best = left, np.zeros(width)
                best[columns] = found / scale[columns]
    errors = np.abs(matrix @ best - wanted)
    return [float(value) for value in best], float(errors.mean())


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
