"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values, and none of the output projection."""

from __future__ import annotations

from engine.models.llama import Llama


class Qwen2(Llama):
    """``Qwen2ForCausalLM``"""

    def biases(self) -> tuple[bool, bool]:
        return True, False

    def refuse_windows(self) -> None:
        config = self.config
        if (
            config.flag("use_sliding_window")
            and "sliding_window" in config
            and config.count("max_window_layers", 28) < self.layers
        ):
            raise config.refuse(
                "layers with a sliding window are not supported in this architecture; set use_sliding_window to false "
                "in config.json if prompts stay shorter than the window"
            )
        super().refuse_windows()
