"""What draft layers propose, by a plain definition: whole sequences at once, no pages, no cache.

The layer for multi-token prediction is transformers', as one layer more of the same model; what is around it, and all
of an EAGLE-3 head, is written out by the papers and the names of published tensors.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
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

    names: ClassVar[Sequence[str]] = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    """Of the product of both inputs, of their norms and of the norm of the output."""

    def __init__(self, folder: Path) -> None:
        config = AutoConfig.from_pretrained(folder)
        self._last = last = config.num_hidden_layers
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
        more = AutoConfig.from_pretrained(folder)
        more.num_hidden_layers = last + 1
        for kinds in ("layer_types", "mlp_layer_types"):
            if getattr(more, kinds, None):
                setattr(more, kinds, [*getattr(more, kinds)[:last], self.kind(getattr(more, kinds)[last - 1])])
        with self.longer(folder) as longer:
            whole = AutoModelForCausalLM.from_pretrained(longer, config=more, **options).eval()
        self._layer, self._rotary = whole.model.layers[last], whole.model.rotary_emb
        self._eps = getattr(config, "rms_norm_eps", 1e-6)
        self._parts = self.parts(load_file(folder / "model.safetensors"))
        self._joined, *self._norms = (self._parts[f"{name}.weight"] for name in self.names)

    def kind(self, last: str) -> str:
        """The kind of the layer, where the model's `last` one has that kind."""
        return last

    @contextmanager
    def longer(self, folder: Path) -> Iterator[Path]:
        """The folder of a checkpoint in which the layer is one more of the model's."""
        yield folder

    def parts(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The layer's tensors by their names below it, the embedding and the head with them."""
        below = f"model.layers.{self._last}."
        return {name.removeprefix(below): t.float() for name, t in tensors.items() if name.startswith(below)}

    def normed(self, x: Tensor, weight_h: Tensor) -> Tensor:
        return normed(x, weight_h, self._eps)

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
        embedded_th = self._embed(torch.tensor(list(tokens)))
        sides = (self.normed(embedded_th, self._norms[0]), self.normed(features_th, self._norms[1]))
        x = (torch.cat(sides, dim=1) @ self._joined.T).unsqueeze(0)
        count = len(tokens)
        positions = torch.arange(-1, count - 1).unsqueeze(0)  # As the layer's inputs are counted in the paper.
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        turned = self._rotary(x, position_ids=positions)
        out = self._layer(x, attention_mask=mask, position_ids=positions, position_embeddings=turned)
        out = out[0] if isinstance(out, tuple) else out
        return self.normed(out.reshape(count, -1), self._norms[2])

    def _embed(self, tokens_t: Tensor) -> Tensor:
        embedded_th: Tensor = self._parts["embed_tokens.weight"][tokens_t]
        return embedded_th

    def _head(self, normed_h: Tensor) -> Tensor:
        logits_v: Tensor = normed_h @ self._parts["shared_head.head.weight"].T
        return logits_v


class PlainQwenMtp(PlainMtp):
    """The same with the names of Qwen3-Next and Qwen 3.5, whose norms have their weights around zero. The layer has
    full attention, and the model's embedding and head."""

    names: ClassVar[Sequence[str]] = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")

    def kind(self, last: str) -> str:
        return "full_attention"

    @contextmanager
    def longer(self, folder: Path) -> Iterator[Path]:
        with TemporaryDirectory() as made:
            tensors = load_file(folder / "model.safetensors")
            named = {name.replace("mtp.layers.0.", f"model.layers.{self._last}."): t for name, t in tensors.items()}
            shutil.copytree(folder, made, dirs_exist_ok=True)
            save_file(named, Path(made) / "model.safetensors", {"format": "pt"})
            yield Path(made)

    def parts(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        ours = {name.removeprefix("mtp."): t.float() for name, t in tensors.items() if name.startswith("mtp.")}
        embed = tensors["model.embed_tokens.weight"].float()
        head = tensors.get("lm_head.weight", embed).float()
        return ours | {"embed_tokens.weight": embed, "shared_head.head.weight": head}

    def normed(self, x: Tensor, weight_h: Tensor) -> Tensor:
        return super().normed(x, 1.0 + weight_h)


class PlainEagle3:
    """An EAGLE-3 head on its model, in float32: one Llama layer written out, over whole sequences."""

    def __init__(self, folder: Path, head: Path) -> None:
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
        self._config = json.loads((head / "config.json").read_text())
        self._parts = {name: tensor.float() for name, tensor in load_file(head / "model.safetensors").items()}
        layers = self.model.config.num_hidden_layers
        self._taps = self._config.get("eagle_aux_hidden_state_layer_ids", [2, layers // 2, layers - 3])

    @torch.inference_mode()
    def proposals(self, tokens: Sequence[int], count: int, among: Sequence[int] = ()) -> list[int]:
        """As `PlainMtp.proposals`."""
        known = torch.tensor([list(tokens[:-1])])
        # The output of the embedding comes first: so hidden state n is the input of layer n.
        hidden = self.model.model(known, output_hidden_states=True).hidden_states
        features_th = torch.cat([hidden[tap][0] for tap in self._taps], dim=1) @ self._parts["fc.weight"].T
        features_th = torch.cat((torch.zeros(1, features_th.shape[1]), features_th))
        told, found = list(tokens), list[int]()
        for _ in range(count):
            outputs_th = self._run(told, features_th)
            features_th = torch.cat((features_th, outputs_th[-1:]))
            logits_v = self._norm("norm", outputs_th[-1]) @ self._parts["lm_head.weight"].T
            distances = self._parts.get("d2t", torch.zeros(len(logits_v)))
            tokens_v = (torch.arange(len(logits_v)) + distances.long()).tolist()
            rated = dict(zip(tokens_v, logits_v.tolist(), strict=True))
            # Of tokens that the head doesn't know, and of equal ones, the first.
            found.append(max(among or rated, key=lambda token: (rated.get(token, -math.inf), -token)))
            told.append(found[-1])
        return found

    def _run(self, tokens: Sequence[int], features_th: Tensor) -> Tensor:
        parts, heads = self._parts, self._config["num_attention_heads"]
        embed_vh: Tensor = parts.get("embed_tokens.weight", self.model.model.embed_tokens.weight)
        embedded_th = self._norm("midlayer.input_layernorm", embed_vh[torch.tensor(list(tokens))])
        read_tk = torch.cat((embedded_th, self._norm("midlayer.hidden_norm", features_th)), dim=1)
        q, k, v = (self._heads(read_tk, name) for name in ("q_proj", "k_proj", "v_proj"))
        q, k = self._turned(q), self._turned(k)
        groups = heads // self._config["num_key_value_heads"]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        count = len(tokens)
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        scores = scores + torch.full((count, count), -torch.inf).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(count, -1)
        x_th: Tensor = features_th + mixed @ parts["midlayer.self_attn.o_proj.weight"].T
        inner = self._norm("midlayer.post_attention_layernorm", x_th)
        gate, up = (inner @ parts[f"midlayer.mlp.{name}.weight"].T for name in ("gate_proj", "up_proj"))
        mlp_th: Tensor = (torch.nn.functional.silu(gate) * up) @ parts["midlayer.mlp.down_proj.weight"].T
        return x_th.add(mlp_th)

    def _heads(self, read_tk: Tensor, name: str) -> Tensor:
        out: Tensor = read_tk @ self._parts[f"midlayer.self_attn.{name}.weight"].T
        return out.view(len(read_tk), -1, self._config["head_dim"])

    def _turned(self, x_thd: Tensor) -> Tensor:
        count, dim = len(x_thd), x_thd.shape[-1]
        rates = self._config["rope_theta"] ** (-torch.arange(0, dim, 2).float() / dim)
        angles = torch.arange(-1, count - 1).float()[:, None] * rates
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x_thd.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return normed(x, self._parts[f"{name}.weight"], self._config["rms_norm_eps"])


def make_eagle3(folder: Path, *, hidden: int, vocab: int, known: Sequence[int], seed: int = 0) -> Path:
    """Write an EAGLE-3 head of random weights, by the names of the paper's code, for a model of `hidden`, which knows
    the tokens `known`, sorted; returns `folder`."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
        "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 2048,
        "vocab_size": vocab, "draft_vocab_size": len(known), "torch_dtype": "float32", "hidden_act": "silu",
    }  # fmt: skip
    random = torch.Generator().manual_seed(seed)

    def product(n: int, k: int) -> Tensor:
        return torch.randn(n, k, generator=random).mul(1.5 * k**-0.5)

    shapes = {"q_proj": (96, 2 * hidden), "k_proj": (48, 2 * hidden), "v_proj": (48, 2 * hidden)}
    tensors = {f"midlayer.self_attn.{name}.weight": product(*shape) for name, shape in shapes.items()}
    tensors |= {
        "midlayer.self_attn.o_proj.weight": product(hidden, 96),
        "midlayer.mlp.gate_proj.weight": product(96, hidden),
        "midlayer.mlp.up_proj.weight": product(96, hidden),
        "midlayer.mlp.down_proj.weight": product(hidden, 96),
        "fc.weight": product(hidden, 3 * hidden),
        "lm_head.weight": product(len(known), hidden),
        "d2t": torch.tensor(known) - torch.arange(len(known)),
        "t2d": torch.isin(torch.arange(vocab), torch.tensor(known)),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = torch.rand(hidden, generator=random) + 0.5
    tensors["norm.weight"] = torch.rand(hidden, generator=random) + 0.5
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
