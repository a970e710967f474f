"""What runs inside a rival's environment: prompts in, tokens with their times out, a line of JSON each.

Knows nothing of this project, which isn't installed there. Only these lines go to the standard output; whatever the
rival prints goes to the standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
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


RIVALS = {"openvino": openvino, "vllm": vllm}


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
