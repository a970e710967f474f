"""A drafter that knows the answers, and is wrong now and then.

Answers of the simulated engine never repeat anything, so prompt lookup would find nothing in them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.decode.request.request import DecodeRequest
from twinpool.sim.fabric.hash_engine import VOCABULARY, recite

_NONE, _WRONG = 0.2, 0.25
"""How often there is no draft, and how often a token of one is wrong."""


class SimDrafter:
    """Implements `decode.speculation.drafting.Drafter`."""

    def __init__(self, spec: PoolSetSpec, seed: int) -> None:
        """`spec`: the whole model's pools."""
        self._spec, self._rng = spec, random.Random(seed)

    def propose(self, request: DecodeRequest, most: int) -> Sequence[int]:
        submit, rng = request.submit, self._rng
        if rng.random() < _NONE:
            return ()
        answer = recite(self._spec, submit.tokens[: submit.prompt_len], submit.sampling).tokens
        right = answer[request.generated :][: rng.randint(1, most)]
        return [rng.randrange(VOCABULARY) if rng.random() < _WRONG else token for token in right]
