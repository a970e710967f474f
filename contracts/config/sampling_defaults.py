"""`router.sampling_defaults`: what sampling parameters are where a request doesn't say."""

from __future__ import annotations

import math

from twinpool.contracts.errors import ConfigError

CHECKPOINT, NONE = "checkpoint", "none"
BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
}
"""The parameters that have a default, with the least and the most that each may be."""


def read_sampling_defaults(text: str, checkpoint: dict[str, float]) -> dict[str, float]:
    """Return the defaults that `text` asks for: ``checkpoint`` has those of the `checkpoint`, ``none`` has none, and
    pairs such as ``temperature=0,top_p=0.9`` count before those of the checkpoint.

    Raises `ConfigError` for a name that isn't in `BOUNDS`, and a value that is out of them.
    """
    if text in (CHECKPOINT, NONE):
        return dict(checkpoint) if text == CHECKPOINT else {}
    found = dict(checkpoint)
    for pair in text.split(","):
        name, _, value = (part.strip() for part in pair.partition("="))
        if name not in BOUNDS:
            raise ConfigError(
                f"config key router.sampling_defaults is {CHECKPOINT}, {NONE}, or pairs such as "
                f"temperature=0,top_p=0.9 of {', '.join(BOUNDS)}; got {text!r:.60}"
            )
        least, most = BOUNDS[name]
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = math.nan
        if not least <= found[name] <= most:
            raise ConfigError(
                f"config key router.sampling_defaults: {name} must be from {least:g} to {most:g}; got {value!r:.40}"
            )
    return found
