"""The terminal output of `twinpool serve`: steps of the start with seconds, tables, a line when it is ready, then lines
about workers that die, restart or leave.

Only these lines go to the terminal. Everything else that this process or its libraries print goes to a log.

Once it serves these are a line each for the model, the workers and the memory (`summary`), what to try (`ways_in`), and
the URL last. The tables that these lines sum up are in the report of the start (`Terminal`).
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shlex
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from twinpool.cluster.assembly.node_shares import NodeShare
from twinpool.cluster.models import DEMO_NAME
from twinpool.cluster.processes.run_folder import RunFolder
from twinpool.cluster.serve.preflight import ServePlan
from twinpool.cluster.serve.shutdown_signal import FAILED, ShutdownSignal, signals_of
from twinpool.contracts.checkpoint.gguf.gguf_header import gguf_types, is_gguf
from twinpool.contracts.checkpoint.tokenizer_files import TOKENIZER, read_checkpoint_text
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.plane_choice import on_gpus
from twinpool.contracts.errors import TwinpoolError
from twinpool.contracts.ids import Role
from twinpool.contracts.json_logs import log_to_stream
from twinpool.contracts.messages.worker_status import WorkerRecord, WorkerView

log = logging.getLogger("twinpool.serve")

FILE_COLUMNS = 160


class Terminal:
    """Writes to the operator's screen; any thread.

    Tables go to the report of the start, a file that `twinpool status --verbose` shows, and to the screen where that
    was asked for: the few lines that count would be lost among them.
    """

    def __init__(
        self,
        clock: Clock,
        out: TextIO,
        began: float | None = None,
        *,
        report: Path | None = None,
        verbose: bool = False,
    ) -> None:
        """`began`: when the start began, by `clock`; None: now. `report`: the file of the report; None: none is kept.
        `verbose`: show on the screen what goes there, too."""
        self._clock = clock
        self._report, self._verbose = report, verbose
        self._start = clock.now() if began is None else began
        self._out = out
        self._lock = threading.Lock()

    def line(self, text: str = "") -> None:
        with self._lock:
            self._out.write(text + "\n")
            self._out.flush()

    def step(self, what: str, text: str) -> None:
        """Write a line for a step of the start that is done, with the seconds since the start."""
        self.line(f"  {self._clock.now() - self._start:6.1f} s  {what:<11} {text}")

    def ready(self, url: str, summary: Sequence[tuple[str, str]], lines: Sequence[str]) -> None:
        """Write what serves, a line a pair of `summary`, then `lines`, and the URL last, which stands out."""
        self.line()
        for what, text in summary:
            self.line(f"  {what:<10}{text}")
        self.line()
        for text in lines:
            self.line(text)
        self.line()
        said = f"Twinpool is ready: {url}"
        self.line(f"\x1b[1;32m{said}\x1b[0m" if self._out.isatty() else said)

    def failure(self, error: Exception, logs: Path) -> None:
        """Write why a run has ended."""
        with self._lock:
            show_failure(error, self._out, logs)

    def nodes(self, prepared: ServePlan) -> None:
        """Report how each node is divided, and the pools of a worker of each role there. Equal nodes share a table."""
        self._print(node_table(prepared))
        seen = []
        for share in prepared.shares.values():
            sizes = [share.sizes(role) for role, count in share.workers.items() if count]
            if sizes not in seen:  # Equal nodes are shown once.
                seen.append(sizes)
                self._print(pool_table(prepared, share))

    def table(self, prepared: ServePlan, views: Sequence[WorkerView]) -> None:
        """Report the table of workers with their pages and memory, then their numerics classes."""
        self._print(worker_table(prepared, views))
        for text in kernel_lines(prepared, views):
            self._print(f"  {text}")

    def _print(self, shown: object) -> None:
        """Add a table or a line to the report."""
        from rich.console import Console

        with self._lock:
            if self._report is not None:
                with contextlib.suppress(OSError), self._report.open("a", encoding="utf-8") as file:
                    # In a file nothing has to fit a screen, and nothing may be cut.
                    Console(file=file, highlight=False, width=FILE_COLUMNS).print(shown, soft_wrap=True)
            if self._verbose or self._report is None:
                width = None if self._out.isatty() else FILE_COLUMNS
                Console(file=self._out, highlight=False, width=width).print(shown, soft_wrap=isinstance(shown, str))
                self._out.flush()


def worker_table(prepared: ServePlan, views: Sequence[WorkerView]) -> object:
    """A rich table: one row a worker."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=True)
    on_cards = any(share.facts.cards for share in prepared.shares.values())
    left = ("worker", "node", "kernels", "device", "plane")
    titles = (
        "worker",
        "node",
        "pid",
        "threads",
        *(["device"] if on_cards else []),
        "kernels",
        "plane",
        "pages",
        "positions",
    )
    for title in (*titles, "pools", "weights"):
        table.add_column(title, justify="left" if title in left else "right", no_wrap=True)
    for view in views:
        page_tokens = prepared.config.cache_for(Role(view.record.role)).page_tokens
        positions = view.status.pages_total * page_tokens
        share, role = prepared.share_of(view.record.node_id), Role(view.record.role)
        table.add_row(
            view.record.name,
            view.record.node,
            str(view.record.pid),
            threads_of(share),
            *([device_of(prepared, view.record)] if on_cards else []),
            kernels_of(view.record),
            view.status.plane or "-",
            f"{view.status.pages_total:,}",
            f"{positions:,}",
            mib(share.plans[role].nbytes),
            mib(prepared.weights),
        )
    return table


def threads_of(share: NodeShare) -> str:
    """The threads that a rank computes with there, and whether it copies and sends on others, in words."""
    return f"{share.threads} + copies" if share.copy_threads and not share.facts.cards else str(share.threads)


def device_of(prepared: ServePlan, record: WorkerRecord) -> str:
    """The cards that a worker's ranks compute on, in words."""
    cards = prepared.cards_of(record.name, Role(record.role))
    return ", ".join(f"cuda:{card}" for card in cards) or ("cpu" if prepared.config.engine.device == "cpu" else "Ray's")


def node_table(prepared: ServePlan) -> object:
    """A rich table: one row a node, with threads of a worker, the budget of host tiers, and its division by role."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    on_cards = any(share.facts.cards for share in prepared.shares.values())
    titles = ("node", "cores", "free", "threads", *(["cards", "free there"] if on_cards else []), "host budget")
    for title in (*titles, *prepared.wanted):
        table.add_column(title, justify="left" if title == "node" else "right", no_wrap=True)
    for share in prepared.shares.values():
        given = any(share.host_bytes.values())
        budget = mib(share.host_budget) if share.host_budget else "set for each" if given else "none"
        each = [f"{n:g} x {mib(share.host_bytes[role])}" if n else "-" for role, n in share.workers.items()]
        facts = share.facts
        cards = [str(len(facts.cards)), mib(sum(card.free for card in facts.cards))] if on_cards else []
        table.add_row(facts.host, str(facts.cores), mib(facts.free), threads_of(share), *cards, budget, *each)
    return table


def kernels_of(record: WorkerRecord) -> str:
    """The kernels that a worker computes with, from its fingerprint: ``C++``, ``torch`` or ``triton``; ``-`` where the
    fingerprint doesn't say."""
    numerics = record.fingerprint.numerics if record.fingerprint is not None else ""
    parts = numerics.partition(":")[2].split("/")
    if parts[0] in {"cuda", "interpreted"}:
        return "triton"
    computing = parts[2] if parts[0] == "cpu" and len(parts) > 2 else ""
    return "C++" if computing.startswith("native-") else computing or "-"


def kernel_lines(prepared: ServePlan, views: Sequence[WorkerView]) -> list[str]:
    """One line for each numerics class with the workers of it, and a second line where torch alone computes."""
    classes: dict[str, list[WorkerRecord]] = {}
    for view in views:
        if view.record.fingerprint is not None:
            classes.setdefault(view.record.fingerprint.numerics, []).append(view.record)
    lines = []
    for numerics, records in classes.items():
        names = "all" if len(records) == len(views) else ", ".join(record.name for record in records)
        lines.append(f"numerics of {names}: {numerics}")
        if kernels_of(records[0]) == "torch":
            lines.append(f"  {why_torch(prepared, records[0])}")
    return lines


def torch_lines(prepared: ServePlan, views: Sequence[WorkerView]) -> list[str]:
    """Why torch alone computes, where it does on a CPU: a line a numerics class of such workers."""
    alone = {view.record.fingerprint: view.record for view in views if kernels_of(view.record) == "torch"}
    return list(dict.fromkeys(why_torch(prepared, record) for record in alone.values()))


def why_torch(prepared: ServePlan, record: WorkerRecord) -> str:
    """Why a worker computes with torch alone, and what to do about it, in words."""
    config = prepared.config.engine
    if config.attention == "torch":
        return (
            "torch alone computes, as engine.attention=torch asks for; auto takes the C++ kernels, several times faster"
        )
    reason = f"see {record.name}'s log on {record.node}"
    if prepared.options.ray_address is None:
        from twinpool.engine.native.compile_kernels import NativeUnavailable
        from twinpool.engine.native.current_kernels import available
        from twinpool.engine.runner.kernel_choice import native_level

        try:
            available(native_level(config))
        except NativeUnavailable as error:
            reason = str(error)
    return f"torch alone computes, several times slower than the C++ kernels would: {reason}"


def pool_table(prepared: ServePlan, share: NodeShare) -> object:
    """A rich table: one row a pool of each role that has workers on the node, and one for what steps take on a rank."""
    from rich import box
    from rich.table import Table

    from twinpool.cache.pool.pool_set import host_counts

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    tiers = any(share.host_bytes.values())
    memory = "on its card" if share.device_bytes else "memory"
    for title in ("role", "pool", "holds", memory, *(["host"] if tiers else []), "for"):
        table.add_column(title, justify="right" if title in ("holds", memory, "host") else "left", no_wrap=True)
    for role, plan in share.plans.items():
        if not share.workers[role]:
            continue
        nbytes = share.host_bytes[role]
        host = host_counts(prepared.pool_set, nbytes, plan.counts) if nbytes else {}
        for pool in plan.pools:
            cells = [role, pool.pool, f"{pool.count:,} {pool.unit}", mib(pool.nbytes)]
            if tiers:
                cells.append(f"{host[pool.pool] - 1:,}" if host else "-")
            table.add_row(*cells, pool.purpose)
        steps = share.steps[role]
        cells = [role, "steps", f"{steps.rows:,} rows", mib(steps.nbytes), *(["-"] if tiers else [])]
        table.add_row(*cells, "tables, draws, activations")
    return table


def mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"


def url_of(host: str, port: int, *, https: bool = False) -> str:
    """The URL at which clients on this machine reach the router."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http{'s' * https}://{shown}:{port}"


def urls_of(prepared: ServePlan) -> tuple[str, str]:
    """The URLs at which clients, and operators, on this machine reach the router."""
    security = prepared.config.security
    https = bool(security.tls_cert)
    url = url_of(prepared.options.host, prepared.port, https=https)
    return url, url_of(security.admin_host, security.admin_port, https=https) if security.admin_port else url


def curl_line(url: str, model: str, *, key: bool = False, ca: str = "") -> str:
    """A command for the shell that asks for a completion. `key`: whether that takes an API key. `ca`: the file of the
    certificates that the endpoint's is checked by, empty for the system's."""
    body = json.dumps({"model": model, "prompt": "It was a fine morning, and", "max_tokens": 32})
    by = (f"--cacert {shlex.quote(ca)} " if ca else "") + ("-H 'Authorization: Bearer KEY' " if key else "")
    return f"curl {url}/v1/completions {by}-H 'Content-Type: application/json' -d {shlex.quote(body)}"


class Screen(io.FileIO):
    """The operator's screen. One that goes away (the reader of a pipe, a session that was closed) ends nothing: what it
    would have shown is logged from then on."""

    _gone = False

    def write(self, data: Any) -> int:
        if not self._gone:
            try:
                return super().write(data)
            except OSError as error:
                self._gone = True
                log.warning("nobody reads what serve prints any more (%s)", error.strerror)
        log.info("%s", bytes(data).decode(errors="replace").strip())
        return len(data)


def take_over_output(log: Path) -> TextIO:
    """Send standard output and error, those of libraries and children included, to `log`; returns the real terminal."""
    sys.stdout.flush()
    sys.stderr.flush()
    terminal = io.TextIOWrapper(io.BufferedWriter(Screen(os.dup(1), "w")), encoding="utf-8", errors="replace")
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    return terminal


def show_failure(error: Exception, out: TextIO, logs: Path) -> None:
    """Show on `out` why a cluster's life has ended."""
    if isinstance(error, TwinpoolError):
        out.write(f"error: {error}\n")
    else:
        log.error("serve failed", exc_info=error)
        out.write(f"error: {type(error).__name__}: {error}; see {logs / 'serve.log'}\n")
    out.flush()


# ---------------------------------------------------------------- a run with the terminal


def in_terminal(
    stop_timeout_s: float,
    run: Callable[[RunFolder, TextIO, ShutdownSignal], int],
    new_folder: Callable[[], RunFolder] = RunFolder,
) -> int:
    """Do a run in a folder that it is given, with this process's terminal and signals; returns the exit code. Errors
    are shown, not raised. `stop_timeout_s`: as of `signals_of`."""
    stopping = signals_of(stop_timeout_s)  # Before there is anything to remove.
    folder = new_folder()
    try:
        out = take_over_output(folder.logs / "serve.log")
        stopping.show_on(out)
        log_to_stream("serve")
        return exit_code(lambda: run(folder, out, stopping), out, folder.logs)
    finally:
        folder.close()


def exit_code(run: Callable[[], int], out: TextIO, logs: Path) -> int:
    """The exit code of `run`. Errors are shown on `out`, not raised."""
    try:
        return run()
    except Exception as error:
        show_failure(error, out, logs)
    finally:
        out.flush()
    return FAILED


DEMO_IS = "a demonstration of 4 MB, whose words make little sense; --model smollm2 answers questions"


def summary(prepared: ServePlan, views: Sequence[WorkerView]) -> list[tuple[str, str]]:
    """A short line each for the model, the workers and the memory, with what each is about; and one for each thing that
    an operator should know: no tokenizer, slow kernels."""
    lines = [("model", model_line(prepared)), ("workers", workers_line(prepared, views))]
    lines += [("memory", memory_line(prepared, views))]
    if text := weights_line(prepared):
        lines.append(("weights", text))
    if not has_tokenizer(prepared):
        text = f"the checkpoint has no {TOKENIZER}: prompts are token ids (/v1/completions), answers have no text"
        lines.append(("no text", text))
    return lines + [("kernels", text) for text in torch_lines(prepared, views)]


def model_line(prepared: ServePlan) -> str:
    """The model's name, and what it is good for where it is the demonstration."""
    spec = prepared.spec
    is_demo = spec.path.name == DEMO_NAME and spec.name == DEMO_NAME
    return f"{spec.name}, {spec.context:,} tokens of context" + (f": {DEMO_IS}" if is_demo else "")


def weights_line(prepared: ServePlan) -> str:
    """The quantisation of the checkpoint, how its weights are kept, and their bytes; empty for dense weights that stay
    so."""
    from twinpool.engine.runner.kernel_choice import inputs_of, weights_kept

    method = prepared.spec.quantization.method or gguf_types(prepared.spec.headers)
    gguf = is_gguf(prepared.spec.path)
    gpu = on_gpus(prepared.config)
    kept = weights_kept(prepared.config.engine, gpu=gpu, gguf=gguf)
    if not method and kept in {"as_stored", "dense"}:
        return ""
    quantised = f"as stored, dense ones {kept}" if method else f"{kept}, quantised when loaded"
    words = {"as_stored": "as stored", "dense": "expanded"}.get(kept, quantised)
    inputs = inputs_of(prepared.config.engine, prepared.spec.quantization, gpu=gpu)
    multiplied = "" if inputs == "float" else ", multiplied in int8"
    return f"{method or 'dense'}, {words}{multiplied}: {mib(prepared.weights)} a worker"


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
    """A command for the shell that asks for a completion, or for a class, and works with this checkpoint."""
    security, (url, _) = prepared.config.security, urls_of(prepared)
    line = curl_line(url, prepared.spec.name, key=bool(security.keys_file), ca=security.tls_ca)
    text = has_tokenizer(prepared)
    if text and not prepared.spec.pooling.labels:
        return line
    ids = [token for token in range(1, prepared.spec.vocab_size) if token not in prepared.spec.eos_token_ids][:4]
    body = {"model": prepared.spec.name, "prompt": ids, "max_tokens": 8, "return_token_ids": True}
    if prepared.spec.pooling.labels:
        line = line.replace("/v1/completions", "/classify", 1)
        body = {"model": prepared.spec.name, "input": "It was a fine morning" if text else ids}
    return line[: line.index("-d ")] + f"-d {shlex.quote(json.dumps(body))}"


def _each(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
