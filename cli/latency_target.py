"""`--slo`: what a good answer keeps."""

from __future__ import annotations

from twinpool.contracts.errors import ConfigError
from twinpool.sim.scale.cluster_plan import LatencyTarget

_FIELDS = {"ttft": "ttft_s", "itl": "tpot_s"}


def read_target(text: str) -> LatencyTarget:
    """``ttft=1.0,itl=0.05``, each in seconds; what is left out has its default. Raises `ConfigError`."""
    given: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            given[_FIELDS[name.strip()]] = float(value)
        except (KeyError, ValueError):
            raise ConfigError(
                f"--slo takes ttft=SECONDS,itl=SECONDS, such as ttft=1.0,itl=0.05; got {text!r}"
            ) from None
    return LatencyTarget(**given)


def shown_target(target: LatencyTarget) -> str:
    return f"ttft={target.ttft_s:g},itl={target.tpot_s:g}"
