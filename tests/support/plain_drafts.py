"""What a checkpoint's draft layer proposes, by a plain definition: whole sequences at once, no pages, no cache.

The layer itself is transformers', as one layer more of the same model; what is around it follows the papers and the
names of published tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM


def normed(x: Tensor, weight_h: Tensor, eps: float) -> Tensor:
    """The root-mean-square norm of each row."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_h


class PlainMtp:
    """The layer for multi-token prediction of a checkpoint with DeepSeek's names, in float32.

    Its input at position i is token i and the final hidden state of the model at position i - 1; zeros before the
    first.
    """

    def __init__(self, folder: Path) -> None:
        config = AutoConfig.from_pretrained(folder)
        self._last = last = config.num_hidden_layers
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
        more = AutoConfig.from_pretrained(folder)
        more.num_hidden_layers = last + 1
        for kinds in ("layer_types", "mlp_layer_types"):
            if getattr(more, kinds, None):
                setattr(more, kinds, [*getattr(more, kinds)[:last], getattr(more, kinds)[last - 1]])
        whole = AutoModelForCausalLM.from_pretrained(folder, config=more, **options).eval()
        self._layer, self._rotary = whole.model.layers[last], whole.model.rotary_emb
        self._eps = getattr(config, "rms_norm_eps", 1e-6)
        tensors = load_file(folder / "model.safetensors")
        below = f"model.layers.{last}."
        self._parts = {name.removeprefix(below): t.float() for name, t in tensors.items() if name.startswith(below)}

    @torch.inference_mode()
    def proposals(self, tokens: Sequence[int], count: int, among: Sequence[int] = ()) -> list[int]:
        """The best tokens behind `tokens`, one after the other, the model having computed all but the last of them.
        `among`: the tokens that may be; none: all."""
        known = torch.tensor([list(tokens[:-1])])
        features_th = self.model.model(known).last_hidden_state[0]
        told, found = list(tokens), list[int]()
        features_th = torch.cat((torch.zeros(1, features_th.shape[1]), features_th))
        for _ in range(count):
            outputs_th = self._run(told, features_th)
            features_th = torch.cat((features_th, outputs_th[-1:]))
            logits_v = self._head(outputs_th[-1])
            found.append(max(among, key=lambda token: float(logits_v[token])) if among else int(logits_v.argmax()))
            told.append(found[-1])
        return found

    def _run(self, tokens: Sequence[int], features_th: Tensor) -> Tensor:
        """The layer's normed outputs at all positions, [T, hidden]."""
        parts, embedded_th = self._parts, self._embed(torch.tensor(list(tokens)))
        sides = (
            normed(embedded_th, parts["enorm.weight"], self._eps),
            normed(features_th, parts["hnorm.weight"], self._eps),
        )
        x = (torch.cat(sides, dim=1) @ parts["eh_proj.weight"].T).unsqueeze(0)
        count = len(tokens)
        positions = torch.arange(-1, count - 1).unsqueeze(0)  # As the layer's inputs are counted in the paper.
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        turned = self._rotary(x, position_ids=positions)
        out = self._layer(x, attention_mask=mask, position_ids=positions, position_embeddings=turned)
        out = out[0] if isinstance(out, tuple) else out
        return normed(out.reshape(count, -1), parts["shared_head.norm.weight"], self._eps)

    def _embed(self, tokens_t: Tensor) -> Tensor:
        embedded_th: Tensor = self._parts["embed_tokens.weight"][tokens_t]
        return embedded_th

    def _head(self, normed_h: Tensor) -> Tensor:
        logits_v: Tensor = normed_h @ self._parts["shared_head.head.weight"].T
        return logits_v
