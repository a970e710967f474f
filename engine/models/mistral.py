"""Mistral: Llama without biases, and in its first versions with a sliding window in all layers."""

from __future__ import annotations

from twinpool.engine.models.llama import Llama
from twinpool.engine.models.sliding_window import whole_window


class Mistral(Llama):
    """``MistralForCausalLM``, and the text of ``Mistral3ForConditionalGeneration``."""

    def biases(self) -> tuple[bool, bool]:
        return False, False

    def layer_windows(self) -> list[int]:
        return whole_window(self.config, self.layers)
