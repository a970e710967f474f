"""What the fast simulator is asked: the pools, the costs of their steps, and when an answer is good enough."""

from __future__ import annotations

from dataclasses import dataclass, field

from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ConfigError
from twinpool.sim.fabric.step_costs import StepCosts

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
class LatencyTarget:
    """What an answer must keep to be good."""

    ttft_s: float = 5.0
    """Seconds to its first token."""
    tpot_s: float = 0.1
    """Seconds from a token to the next, on its average."""

    def __post_init__(self) -> None:
        if not (self.ttft_s > 0 and self.tpot_s > 0):
            raise ConfigError(f"a latency target must be above 0 seconds, got {self.ttft_s:g} and {self.tpot_s:g}")

    @classmethod
    def read(cls, text: str) -> LatencyTarget:
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
    target: LatencyTarget = field(default_factory=LatencyTarget)
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
