"""`serve --model smollm2`, fetched as a newcomer has it fetched, says what transformers says on its own reading of the
same file: on prose, in every type that the file can be written in, and by its own tokenizer.

Needs a network or a mirror on the first run; 93 MB, kept in the models' folder.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
from functools import partial
from pathlib import Path

import gguf
import httpx
import pytest
from transformers import AutoTokenizer

from tests.engine.harness import Bench
from tests.soak.published import prose
from tests.support.checkpoints import compare
from tests.support.gguf_files import GgufOracle
from tests.support.served_cluster import ROOT, complete, serving
from twinpool.cluster.models import SMOLLM2
from twinpool.contracts.errors import CheckpointError
from twinpool.router.text.tokenizer import read_model_tokenizer

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(1800)]
PROMPTS, TOKENS, FEWER = 20, 48, 12
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_0")


@pytest.fixture(scope="module")
def file() -> Path:
    try:
        return SMOLLM2.fetch(print)
    except CheckpointError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def prompts(file: Path) -> list[list[int]]:
    """Passages of novels, 60 to 440 tokens long."""
    ids = read_model_tokenizer(file, 1000).encode("\n".join(prose()), add_special=False)
    return [list(ids[at * 500 : at * 500 + 60 + at * 20]) for at in range(PROMPTS)]


def test_its_tokens_are_those_of_transformers_reading(file: Path) -> None:
    mine, theirs = read_model_tokenizer(file, 1000), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    texts = [*prose(), *(path.read_text() for path in sorted((ROOT / "router" / "text").glob("*.py")))]
    texts += [
        "Straße, Ελληνικά, русский, 日本語 한국어 العربية 🙂👩‍👩‍👧",
        "a1b22c333 3.14 1,000\t\n  x",
        "<|im_start|>user\nhi<|im_end|>",
    ]
    for text in texts:
        assert list(mine.encode(text, add_special=False)) == theirs(text, add_special_tokens=False)["input_ids"], text
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    assert mine.render(chat, True, {}) == theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)


def test_a_cluster_says_what_transformers_says_on_prose(file: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    oracle = GgufOracle(file)
    sections = {"engine": {"dtype": "float32"}, "router": {"request_timeout_s": 600}}
    with serving("smollm2", tmp_path / "run", sections=sections, ready_within=300, orderly=False) as cluster:

        async def ask() -> list[list[int]]:
            async with httpx.AsyncClient(base_url=cluster.url, timeout=900) as client:
                body = partial(cluster.body, max_tokens=TOKENS)
                answers = await asyncio.gather(*[complete(client, body(prompt)) for prompt in prompts])
            return [answer.tokens for answer in answers]

        answers = asyncio.run(ask())
        said = [typed(block, cluster.url) for block in blocks("docs/models.md", "sh")]
        cluster.settle()
    assert said
    assert all('"content":"The capital of France is Paris."' in answer for answer in said)
    exact = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        verdict = compare(oracle, prompt, answer)
        assert len(answer) == TOKENS
        assert verdict.equal, (verdict, prompt)
        exact += verdict.exact
    print(f"\n{exact} of {PROMPTS} to the token")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def typed(block: str, url: str) -> str:
    """What the page says to type, typed."""
    command = ["bash", "-euo", "pipefail", "-c", block.replace("http://127.0.0.1:8000", url)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.parametrize("kind", KINDS)
def test_its_weights_in_every_type_that_can_be_made(
    file: Path, prompts: list[list[int]], tmp_path: Path, kind: str
) -> None:
    written = rewritten(file, tmp_path / f"{kind}.gguf", kind)
    oracle, bench = GgufOracle(written), Bench(written, dtype="float32", tokens=16_384)
    for prompt, answer in zip(prompts, bench.generate_many(prompts, FEWER), strict=True):
        verdict = compare(oracle, prompt, answer)
        assert verdict.equal, (verdict, prompt)


def rewritten(file: Path, to: Path, kind: str) -> Path:
    """The same file with its matrices in another type."""
    reader, wanted = gguf.GGUFReader(file), gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(to, "llama")
    for key, one in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            inner = one.types[1] if len(one.types) > 1 else None
            writer.add_key_value(key, one.contents(), one.types[0], inner)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        stored = wanted if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to
