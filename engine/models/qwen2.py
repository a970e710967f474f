"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values, and none of the output projection.

The text of Qwen2-VL and Qwen2.5-VL is one as well.
"""

from __future__ import annotations

from twinpool.engine.models.llama import Llama
from twinpool.engine.models.sliding_window import qwen_windows


class Qwen2(Llama):
    """``Qwen2ForCausalLM``"""

    def biases(self) -> tuple[bool, bool]:
        return True, False

    def layer_windows(self) -> list[int]:
        return qwen_windows(self.config, self.layers)
