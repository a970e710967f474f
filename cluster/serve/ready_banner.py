"""What `twinpool serve` says once it serves: a line each for the model, the workers and the memory, what to try, and
the URL last. The tables that these lines sum up are in the report of the start (`Terminal`).
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence

from twinpool.cluster.models.model_source import DEMO_NAME
from twinpool.cluster.serve.preflight import ServePlan
from twinpool.cluster.serve.terminal import curl_line, kernels_of, mib, threads_of, torch_lines, urls_of
from twinpool.contracts.checkpoint.checkpoint_files import TOKENIZER, read_checkpoint_text
from twinpool.contracts.ids import Role
from twinpool.contracts.messages.worker_status import WorkerView

DEMO_IS = "a demonstration of 4 MB, whose words make little sense; --model smollm2 answers questions"


def summary(prepared: ServePlan, views: Sequence[WorkerView]) -> list[tuple[str, str]]:
    """A short line each for the model, the workers and the memory, with what each is about; and one for each thing that
    an operator should know: no tokenizer, slow kernels."""
    lines = [("model", model_line(prepared)), ("workers", workers_line(prepared, views))]
    lines += [("memory", memory_line(prepared, views))]
    if not has_tokenizer(prepared):
        text = f"the checkpoint has no {TOKENIZER}: prompts are token ids (/v1/completions), answers have no text"
        lines.append(("no text", text))
    return lines + [("kernels", text) for text in torch_lines(prepared, views)]


def model_line(prepared: ServePlan) -> str:
    """The model's name, and what it is good for where it is the demonstration."""
    spec = prepared.spec
    is_demo = spec.path.name == DEMO_NAME and spec.name == DEMO_NAME
    return f"{spec.name}, {spec.context:,} tokens of context" + (f": {DEMO_IS}" if is_demo else "")


def workers_line(prepared: ServePlan, views: Sequence[WorkerView]) -> str:
    """How many workers of each role there are, on how many nodes, and by what they compute and send."""
    roles = Counter(str(view.record.role) for view in views)
    counts = ", ".join(f"{count} {role}" for role, count in roles.items())
    nodes = _each(view.record.node for view in views)
    where = f"on {nodes[0]}" if len(nodes) == 1 else f"on {len(nodes)} nodes"
    threads = _each(threads_of(prepared.share_of(view.record.node_id)) for view in views)
    kernels = _each(kernels_of(view.record) for view in views)
    planes = _each(view.status.plane for view in views if view.status.plane)
    by = f"; pages go by {' and '.join(planes)}" if planes else ""
    return f"{counts} {where}; threads of each: {' or '.join(threads)}; kernels: {' and '.join(kernels)}{by}"


def memory_line(prepared: ServePlan, views: Sequence[WorkerView]) -> str:
    """How many tokens the workers of a role hold together, and what they take for that and for weights."""
    held: Counter[str] = Counter()
    pools = 0
    for view in views:
        role = Role(view.record.role)
        held[role] += view.status.pages_total * prepared.config.cache_for(role).page_tokens
        pools += prepared.share_of(view.record.node_id).plans[role].nbytes
    tokens = ", ".join(f"{role} {count:,} tokens" for role, count in held.items())
    return f"room for: {tokens}; {mib(pools)} in all, and weights of {mib(prepared.weights)}"


def has_tokenizer(prepared: ServePlan) -> bool:
    return read_checkpoint_text(prepared.spec.path, TOKENIZER) is not None


def ways_in(prepared: ServePlan) -> list[str]:
    """What to open and what to try, a line each."""
    url, operators = urls_of(prepared)
    admin = [f"operators' paths: {operators}"] if operators != url else []
    details = "details: twinpool status --verbose"
    return [*admin, details, f"dashboard: {operators}/dashboard", ask_line(prepared)]


def ask_line(prepared: ServePlan) -> str:
    """A command for the shell that asks for a completion, and works with this checkpoint."""
    security, (url, _) = prepared.config.security, urls_of(prepared)
    line = curl_line(url, prepared.spec.name, key=bool(security.keys_file), ca=security.tls_ca)
    if has_tokenizer(prepared):
        return line
    ids = [token for token in range(1, prepared.spec.vocab_size) if token not in prepared.spec.eos_token_ids][:4]
    body = {"model": prepared.spec.name, "prompt": ids, "max_tokens": 8, "return_token_ids": True}
    return line[: line.index("-d ")] + f"-d {shlex.quote(json.dumps(body))}"


def _each(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
