"""Make a checkpoint with random weights, to measure speed at a size or of a family that is not committed.

    python -m bench.common.random_model 445m FOLDER      # Qwen3-shaped
    python -m bench.common.random_model sparse FOLDER    # a miniature of a family: see bench/common/family_models.py

It has the demo's tokenizer, so a cluster can serve it; what it says is noise.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from bench.common.bench_report import flag_parser
from bench.common.family_models import FAMILIES, LARGE, config_of

DEMO = Path(__file__).parents[2] / "cluster" / "demo"


SIZES: dict[str, dict[str, int]] = {
    "4m": {"hidden": 192, "layers": 8, "heads": 4, "kv_heads": 2, "head_dim": 48, "inner": 512, "vocab": 2048},
    "60m": {"hidden": 512, "layers": 16, "heads": 8, "kv_heads": 4, "head_dim": 64, "inner": 1792, "vocab": 4096},
    "445m": {"hidden": 1024, "layers": 28, "heads": 16, "kv_heads": 8, "head_dim": 128, "inner": 3072, "vocab": 4096},
    "qwen3-445m": {
        "hidden": 1024, "layers": 28, "heads": 16, "kv_heads": 8, "head_dim": 64, "inner": 3072, "vocab": 32768,
    },
    "qwen3-8b-cut": {
        "hidden": 4096, "layers": 12, "heads": 32, "kv_heads": 8, "head_dim": 128, "inner": 12288, "vocab": 151936,
    },
}  # fmt: skip
"""445m is Qwen3-0.6B with a small vocabulary; qwen3-445m has narrower heads, a larger vocabulary and 386 M parameters,
as its embedding is tied. qwen3-8b-cut has a third of Qwen3-8B's layers (2.9 B parameters)."""


NAMES = (*SIZES, *FAMILIES, *LARGE)


def _qwen3(shape: dict[str, int]) -> Any:
    return Qwen3Config(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        max_position_embeddings=4096,
        initializer_range=0.05,
        tie_word_embeddings=True,
        use_sliding_window=False,
        eos_token_id=None,
    )


def make(folder: Path, name: str, seed: int = 0, device: str = "cpu") -> Path:
    """Write a bf16 checkpoint of one of `NAMES` to `folder`; returns it. `device`: where its weights are drawn."""
    config = _qwen3(SIZES[name]) if name in SIZES else config_of(name)
    torch.manual_seed(seed)
    factory: Any = AutoModelForCausalLM
    with torch.device(device):
        model = factory.from_config(config, dtype=torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / file, folder / file)
    return folder


def main() -> None:
    parser = flag_parser(__doc__, json_file=False)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    print(make(args.folder, args.name))


if __name__ == "__main__":
    main()
