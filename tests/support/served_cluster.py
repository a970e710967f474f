"""A whole Twinpool, started as an operator starts it, and clients of it.

`serving(...)` runs the command in a process of its own with `transformers` unimportable, and at its end sends Ctrl-C
and looks for what was left behind. `Serving.settle` is the check that every test ends with.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-P", "-m", "twinpool.cli.commands")
READY = "Twinpool is ready: "


def environment(runtime: Path) -> dict[str, str]:
    """The environment of everything that is started: no transformers, run files and logs apart from other runs'."""
    path = os.pathsep.join([str(ROOT / "tests" / "unimportable"), str(ROOT)])
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TWINPOOL_", "RAY_"))}
    return kept | {"PYTHONPATH": path, "XDG_RUNTIME_DIR": str(runtime), "XDG_STATE_HOME": str(runtime / "state")}


def processes_of(runtime: Path) -> list[psutil.Process]:
    """The processes that run in `environment(runtime)`: whatever was started there, and theirs."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("XDG_RUNTIME_DIR") == str(runtime):
                found.append(process)
    return found


OWN_NAMES = (
    *("router", "cluster", "cache", "contracts", "engine", "transfer", "worker", "prefill", "decode", "colocate"),
    *("sim", "cli", "ray", "torch", "numpy", "zmq", "msgpack", "json", "logging", "uvicorn"),
)


def own_packages(folder: Path) -> None:
    """Put packages of a user's own into `folder`, with names of ours and of what we import; none may be imported."""
    for name in OWN_NAMES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise SystemExit('{name} of the folder was imported')\n")


@dataclass
class Answer:
    """One choice of `/v1/completions`, streamed or not."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    twinpool: dict[str, Any] = field(default_factory=dict)
    logprobs: dict[str, Any] | None = None

    @property
    def cached(self) -> int:
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))


@dataclass(frozen=True)
class Access:
    """By what clients and operators are let in."""

    ca: Path | None = None
    key: str = ""
    admin_key: str = ""

    def web(self) -> dict[str, Any]:
        """What httpx is given."""
        verify = ssl.create_default_context(cafile=self.ca) if self.ca is not None else True
        return {"verify": verify, "headers": {"Authorization": f"Bearer {self.key}"} if self.key else {}}

    @property
    def operator(self) -> dict[str, str]:
        """What is in an operator's environment."""
        return {"TWINPOOL_ADMIN_TOKEN": self.admin_key} if self.admin_key else {}


class Serving:
    """A running Twinpool and what one may do to it."""

    access = Access()

    def __init__(
        self, process: subprocess.Popen[str], runtime: Path, lines: list[str], url: str, access: Access | None = None
    ) -> None:
        self.process, self.runtime, self.lines, self.url = process, runtime, lines, url
        self.access = access or Access()
        self.model = httpx.get(f"{url}/v1/models", timeout=60, **self.access.web()).json()["data"][0]["id"]

    # ------------------------------------------------------------ the operator's side

    def twinpool(self, *arguments: str, timeout: float = 180) -> subprocess.CompletedProcess[str]:
        """Run `twinpool ARGUMENTS` against this cluster, found by its run file."""
        return subprocess.run(
            [*COMMAND, *arguments], env=environment(self.runtime) | self.access.operator, cwd=self.runtime,
            capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip

    def status(self) -> dict[str, dict[str, Any]]:
        """Each worker's line of `status --json`, by name."""
        done = self.twinpool("status", "--json")
        assert done.returncode == 0, done.stderr
        return {w["name"]: w for w in json.loads(done.stdout)["workers"]}

    def check(self) -> dict[str, Any]:
        done = self.twinpool("check", "--json")
        report: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == (0 if report["ok"] else 1)
        return report

    def settle(self) -> None:
        """Wait until nothing runs, then check: every page, slot, lease and room is accounted for."""

        def idle() -> bool:
            # Asked again and again: a command takes a third of a second of a processor.
            told = httpx.get(f"{self.url}/cluster/status", timeout=60, **self.access.web())
            if told.status_code != 200:  # Where operators have a port of their own.
                return not any(w["running"] or w["waiting"] for w in self.status().values())
            return not any(w["running"] or w["waiting"] for w in told.json()["workers"])

        until(idle, "idle")
        reports = list[dict[str, Any]]()

        def no_rooms() -> bool:
            reports.append(self.check())
            return not any(worker["checked"].get("rooms") for worker in reports[-1]["workers"])

        until(no_rooms, "all rooms to end")
        assert reports[-1]["ok"], reports[-1]

        def whole() -> bool:
            return all(worker["pages_free"] == worker["pages_total"] for worker in self.status().values())

        until(whole, "all pages to be free: an audit holds those of one answer until it ends")

    # ------------------------------------------------------------ the client's side

    def metrics(self) -> dict[str, float]:
        """Each sample of /metrics, by name with labels."""
        found = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name] = float(value)
        return found

    def metric(self, name: str, **labels: str) -> float:
        """The sum of `name`'s samples that carry `labels`."""
        marks = [f'{k}="{v}"' for k, v in labels.items()]
        return sum(v for k, v in self.metrics().items() if k.partition("{")[0] == name and all(m in k for m in marks))

    def complete(self, prompt: Sequence[int] | str, **body: Any) -> Answer:
        return self.complete_all([prompt], **body)[0]

    def complete_all(
        self, prompts: Sequence[Sequence[int] | str], at_once: int = 16, stream: bool = False, **body: Any
    ) -> list[Answer]:
        """Every prompt's answer, `at_once` requests at a time."""

        async def all_of_them() -> list[Answer]:
            gate = asyncio.Semaphore(at_once)
            async with httpx.AsyncClient(base_url=self.url, timeout=120, **self.access.web()) as client:

                async def one(prompt: Sequence[int] | str) -> Answer:
                    async with gate:
                        return await complete(client, self.body(prompt, stream=stream, **body))

                return list(await asyncio.gather(*[one(p) for p in prompts]))

        return asyncio.run(all_of_them())

    def body(self, prompt: Sequence[int] | str, **more: Any) -> dict[str, Any]:
        text = prompt if isinstance(prompt, str) else list(prompt)
        return {
            "model": self.model, "prompt": text, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more
        }  # fmt: skip


async def complete(client: httpx.AsyncClient, body: dict[str, Any], key: str = "") -> Answer:
    """One completion; raises on any answer but a whole one. `key`: by which its client may come back for it."""
    headers = {"X-Twinpool-Timeline": "1"} | ({"Idempotency-Key": key} if key else {})
    if not body.get("stream"):
        response = await client.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        whole = response.json()
        choice = whole["choices"][0]
        return Answer(
            choice["token_ids"], choice["text"], choice["finish_reason"], whole["usage"], whole["twinpool"],
            choice.get("logprobs"),
        )  # fmt: skip
    answer, ended = Answer(), False
    body = body | {"stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                _take(answer, json.loads(line.removeprefix("data: ")))
    assert ended, f"the stream broke off after {len(answer.tokens)} tokens"
    return answer


def _take(answer: Answer, event: dict[str, Any]) -> None:
    assert "error" not in event, event
    for choice in event["choices"]:
        answer.tokens += choice.get("token_ids") or []
        answer.text += choice["text"]
        for key, values in (choice.get("logprobs") or {}).items():
            answer.logprobs = answer.logprobs or {}
            answer.logprobs[key] = [*answer.logprobs.get(key, ()), *values]
        answer.finish = choice["finish_reason"] or answer.finish
    answer.usage = event.get("usage") or answer.usage
    answer.twinpool = event.get("twinpool") or answer.twinpool


COMES_BACK_S = 0.5
"""The pause between two commands by which a worker's return is awaited: they would take the processor that it needs."""


def until(true: Callable[[], bool], what: str, timeout: float = 180, pause_s: float = 0.05) -> None:
    """Ask again and again, with a deadline."""
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, f"waited {timeout:g} s for {what}"
        threading.Event().wait(pause_s)


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The process and all that descend from it."""
    root = psutil.Process(process.pid)
    return [root, *root.children(recursive=True)]


@contextmanager
def serving(
    model: Path | str | None,
    runtime: Path,
    *flags: str,
    sections: dict[str, Any] | None = None,
    ready_within: float = 400,
    prefix: Sequence[str] = (),
    orderly: bool = True,
    temporary: Path | None = None,
    access: Access | None = None,
    python: Path | None = None,
) -> Iterator[Serving]:
    """`twinpool serve` on a free port with `sections` as --set flags, ended by Ctrl-C. `prefix`: a command
    that becomes it. `model`: None where a file among `flags` names it. `orderly`: False where the machine may be too
    busy for an end within its deadline, which is longer than an operator's. `temporary`: where its temporary files go.
    `access`: by what its clients are let in. `python`: the interpreter of an environment that has another build."""
    runtime.mkdir(parents=True, exist_ok=True)
    sections = {"cluster": {}, **(sections or {})}
    sections["cluster"] = {"stop_timeout_s": 25, "start_timeout_s": 300, **sections["cluster"]}
    settings = [f"{s}.{key}={value}" for s, keys in sections.items() for key, value in keys.items()]
    twinpool = COMMAND if python is None else (str(python), *COMMAND[1:])
    named = [] if model is None else ["--model", str(model)]
    command = [*prefix, *twinpool, "serve", *named, "--port", "0", *flags]
    command += [part for setting in settings for part in ("--set", setting)]
    variables = environment(runtime) | ({"TMPDIR": str(temporary)} if temporary is not None else {})
    if python is not None:
        del variables["PYTHONPATH"]  # It has this build.
    process = subprocess.Popen(
        command, env=variables, cwd=runtime,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    lines: list[str] = []
    try:
        yield Serving(process, runtime, lines, _await_ready(process, lines, ready_within), access)
    finally:
        _end(process, lines, orderly)


def _await_ready(process: subprocess.Popen[str], lines: list[str], within: float) -> str:
    """Collects the output from now on; returns the URL once it has been printed."""
    heard: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            heard.put(line)
        heard.put("")

    threading.Thread(target=read, daemon=True).start()
    deadline = time.monotonic() + within
    while True:
        try:
            line = heard.get(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            raise AssertionError("not ready in time:\n" + "\n".join(lines)) from None
        assert line, "serve ended:\n" + "\n".join(lines)
        if READY in line:
            return line.split(READY)[1].strip()


def _end(process: subprocess.Popen[str], lines: list[str], orderly: bool) -> None:
    if process.poll() is not None:
        return
    relatives = family(process)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    try:
        process.wait(120)
    except subprocess.TimeoutExpired:
        for relative in relatives:
            relative.kill()
        raise AssertionError("serve didn't end within 120 s of Ctrl-C:\n" + "\n".join(lines[-20:])) from None
    took = time.monotonic() - began
    _, alive = psutil.wait_procs(relatives, timeout=60)
    for relative in alive:
        relative.kill()
    assert not alive, f"left behind by Ctrl-C: {alive}"
    code = process.returncode
    assert code == 0 or not orderly, f"exit code {code}, {took:.1f} s after Ctrl-C:\n" + "\n".join(lines[-20:])
    lines.append(f"ended {took:.1f} s after Ctrl-C")
