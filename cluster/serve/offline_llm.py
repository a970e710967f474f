"""`twinpool.LLM`: a model in this process, for batches of prompts, without a port.

What `serve --set transfer.plane=local` runs is behind it: workers on threads of their own, and a router, on an event
loop in another thread. Requests are bodies as the endpoint takes them, so that each field means what it means there,
and is refused in the same words; nothing is sent anywhere. By default one worker has both roles (`serve --colocate`).

Each call has a deadline, at which everything that it began is ended. Not more than half of the router's queue is
under way at once, over all calls, so a call may have any number of prompts. `close` ends workers, threads and
readers; so does the end of a `with`.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict, TypeVar

from twinpool.cluster.serve.preflight import ServeOptions, adapters_of, prepare
from twinpool.cluster.serve.serve_one_process import HEALTHY_S, LocalDirectory, start_worker
from twinpool.cluster.worker_process.worker_thread import WorkerEnd
from twinpool.contracts.compact_json import joined
from twinpool.contracts.errors import TwinpoolError
from twinpool.router.links.controller_port import ControllerPorts
from twinpool.router.openai.api_errors import failure_of_done
from twinpool.router.service.open_answers import ClientRequest
from twinpool.router.service.router_service import RouterService
from twinpool.router.tokenizer_pool.tokenizer_process import FrameKind

__all__ = ["LLM", "AnswerFailed", "Drawing", "Generated", "PromptAnswers"]

T = TypeVar("T")
POLL_S = 0.02
CLOSE_S = 30.0
"""How long the router may take to end."""
LATER_S = 5.0
"""By how much the router's own deadline of an answer is after that of the call, which is to be the one that is met."""
Prompt = str | Sequence[int]


class Drawing(TypedDict, total=False):
    """How answers are drawn: fields of `/v1/completions` and of chats, as docs/using.md has them."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    n: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    allowed_token_ids: Sequence[int]
    logit_bias: Mapping[str, float]
    ignore_eos: bool
    skip_special_tokens: bool
    logprobs: int | bool
    top_logprobs: int
    prompt_logprobs: int
    structured_outputs: Mapping[str, object]
    response_format: Mapping[str, object]
    tools: Sequence[Mapping[str, object]]
    tool_choice: str | Mapping[str, object]
    chat_template_kwargs: Mapping[str, object]
    model: str
    priority: int
    cache_salt: str


class AnswerFailed(TwinpoolError):
    """Raised when an answer of `LLM` has ended in an error, which its words name."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One answer."""

    text: str
    token_ids: tuple[int, ...]
    """A stop token that ended it among them."""
    finish_reason: str
    """``stop``, ``length`` or ``tool_calls``."""
    stop_reason: str | int | None
    """The stop string or token that ended it; None for the model's end and for ``length``."""
    logprobs: Mapping[str, Any] | None
    """As the endpoint has them; None where they weren't asked for."""
    message: Mapping[str, Any] | None = None
    """Of a chat: the message with its calls and reasoning."""


@dataclass(frozen=True, slots=True)
class PromptAnswers:
    """What one prompt came to."""

    prompt_token_ids: tuple[int, ...]
    answers: tuple[Generated, ...]
    """As many as `n`."""
    prompt_logprobs: Sequence[Mapping[str, Any] | None] | None

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.answers[0].text


class LLM:
    """A model in this process; see the module's prose. Its methods may be called from any thread."""

    def __init__(
        self,
        model: str,
        *,
        prefill: int = 0,
        decode: int = 0,
        config: Path | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        """Load a model: what `serve --model` takes. `prefill` and `decode`: how many workers of two pools; 0: one
        worker of both roles. `config`: a configuration file; `settings`: keys that go before it, as
        ``{"cache.page_tokens": 32}``. Raises `TwinpoolError` where that can't be."""
        pools = bool(prefill or decode)
        options = ServeOptions(
            model,
            prefill=max(1, prefill),
            decode=max(1, decode),
            colocate=0 if pools else 1,
            port=0,
            config=config,
            assignments=(
                *(f"{key}={json.dumps(value)}" for key, value in (settings or {}).items()),
                "transfer.plane=local",
            ),
        )
        self._stack = ExitStack()
        self._died: str = ""
        self._directory: LocalDirectory | None = None
        self._loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()
        self._stack.callback(lambda: None if self._loop.is_running() else self._loop.close())
        self._gone = asyncio.Event()
        """Set once a worker has died."""
        self._submitting, self._closed = threading.Lock(), False
        with ExitStack() as starting:
            starting.callback(self.close)
            plan = prepare(options)
            workers = []
            for name, role in plan.workers:
                workers.append(start_worker(plan, name, role, self._stack, self._on_end))
            directory = self._directory = LocalDirectory(workers)
            directory.served = {one.name: one for one in adapters_of(plan.config)}
            self._room = AnswerRoom(max(1, plan.config.router.max_queue // 2))
            self._longest_s = plan.config.router.max_timeout_s
            self._start(lambda: RouterService(plan.spec, plan.config, directory, ports=ControllerPorts()))
            starting.pop_all()

    def _start(self, make: Callable[[], RouterService]) -> None:
        """Run a router on a loop of its own, until `close`."""
        thread = threading.Thread(target=self._loop.run_forever, name="router", daemon=True)
        thread.start()

        async def rest_ended() -> None:
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            if rest:
                await asyncio.wait(rest)

        def end() -> None:
            with suppress(TimeoutError):
                self._submit(rest_ended(), CLOSE_S)  # Else who waits for a call would wait for ever.
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(CLOSE_S)

        self._stack.callback(end)

        async def started() -> RouterService:
            service = make()
            await service.start()
            return service

        self._service = self._wait(started(), HEALTHY_S)
        self._stack.callback(lambda: self._submit(self._service.close(), CLOSE_S))

        async def healthy() -> None:
            core = self._service.core
            while not all(core.serving(role) for role in core.workers.roles):
                if self._died:
                    raise AnswerFailed(self._died)
                await asyncio.sleep(POLL_S)

        try:
            self._wait(healthy(), HEALTHY_S)
        except TimeoutError:
            raise TwinpoolError(f"no worker was ready within {HEALTHY_S:g} s") from None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything and give all memory back. Calls of other threads end in `AnswerFailed`. Idempotent."""
        with self._submitting:
            self._closed = True
        self._stack.close()

    # ------------------------------------------------------------ calls

    def generate(
        self, prompts: Prompt | Sequence[Prompt], drawing: Drawing | None = None, *, timeout_s: float = 600.0
    ) -> list[PromptAnswers]:
        """Continue prompts, texts or token ids; returns what each came to, in order.

        Raises `RequestError` naming a field that is wrong, `AnswerFailed` where a worker failed, and `TimeoutError`
        after `timeout_s` seconds; what else was under way is ended then.
        """
        listed = [prompts] if isinstance(prompts, str) or _is_tokens(prompts) else list(prompts)
        bodies = [{**(drawing or {}), "prompt": one if isinstance(one, str) else list(one)} for one in listed]  # type: ignore[arg-type]
        return [_answers_of(told) for told in self._answer(FrameKind.COMPLETION, bodies, timeout_s)]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        drawing: Drawing | None = None,
        *,
        timeout_s: float = 600.0,
    ) -> list[PromptAnswers]:
        """Answer a chat, or several; raises as `generate` does."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        bodies = [{**(drawing or {}), "messages": list(chat)} for chat in ([messages] if one else messages)]
        return [_answers_of(told) for told in self._answer(FrameKind.CHAT, bodies, timeout_s)]

    def embed(
        self, inputs: Prompt | Sequence[Prompt], *, dimensions: int | None = None, timeout_s: float = 600.0
    ) -> list[list[float]]:
        """Embed texts, or token ids; raises as `generate` does."""
        listed = [inputs] if isinstance(inputs, str) or _is_tokens(inputs) else list(inputs)
        bodies = [{"input": one if isinstance(one, str) else list(one), "dimensions": dimensions} for one in listed]  # type: ignore[arg-type]
        told = self._answer(FrameKind.EMBEDDINGS, bodies, timeout_s)
        return [list(one["data"][0]["embedding"]) for one in told]

    def check(self) -> list[str]:
        """Recount what the router holds; returns a sentence for each disagreement."""

        async def checked() -> list[str]:
            return self._service.check()

        return self._wait(checked(), CLOSE_S)

    # ------------------------------------------------------------ one call

    def _answer(self, kind: FrameKind, bodies: Iterable[dict[str, Any]], timeout_s: float) -> list[dict[str, Any]]:
        """The answers to bodies, as the endpoint writes them."""
        text = {} if kind is FrameKind.EMBEDDINGS else {"return_token_ids": True}
        timeout = {"timeout": min(max(0.0, timeout_s) + LATER_S, self._longest_s)}
        raw = [
            (json.dumps({**body, **text, **timeout}).encode("utf-8", "surrogatepass"), body.get("n")) for body in bodies
        ]

        async def all_of_them() -> list[dict[str, Any]]:
            async with asyncio.TaskGroup() as group:
                death = group.create_task(self._death())
                tasks = [group.create_task(self._one(kind, body, choices)) for body, choices in raw]
                for task in tasks:
                    await task
                death.cancel()
            return [task.result() for task in tasks]

        try:
            return self._wait(all_of_them(), timeout_s)
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _death(self) -> None:
        """Wait for a worker to die; raises `AnswerFailed` then."""
        await self._gone.wait()
        raise AnswerFailed(self._died)

    async def _one(self, kind: FrameKind, raw: bytes, choices: object) -> dict[str, Any]:
        """One answer. `choices`: the body's `n`, as it was given."""
        async with self._room.taken(choices if isinstance(choices, int) and choices > 0 else 1):
            if self._died:
                raise AnswerFailed(self._died)
            stream = await self._service.open(ClientRequest(kind, raw, "offline"))
            try:
                await stream.ended()
                if stream.failed is not None:
                    raise AnswerFailed(failure_of_done(stream.failed, stream.request).message)
                told: dict[str, Any] = json.loads(joined(stream.answer.whole(None)))
                return told
            finally:
                self._service.abandon(stream)  # Does nothing unless the answer was cut short.

    def _wait(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run `work` of a call on the router's loop. Raises `TimeoutError` once it took longer, having ended it, and
        `AnswerFailed` where this `LLM` is closed before or meanwhile."""
        with self._submitting:
            if self._closed:
                work.close()
                raise AnswerFailed("this LLM is closed: make a new one")
            future = self._submitted(work, timeout_s)
        try:
            return future.result()
        except CancelledError:
            raise AnswerFailed("this LLM was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    def _submit(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run `work` on the router's loop while all of it ends. Raises `TimeoutError`."""
        return self._submitted(work, timeout_s).result()

    def _submitted(self, work: Coroutine[Any, Any, T], timeout_s: float) -> Future[T]:
        async def bounded() -> T:
            async with asyncio.timeout(timeout_s):
                return await work

        return asyncio.run_coroutine_threadsafe(bounded(), self._loop)

    def _on_end(self, name: str, end: WorkerEnd, reason: str) -> None:
        """Note that a worker has ended; runs on its engine thread."""
        if end not in (WorkerEnd.LEFT, WorkerEnd.STOPPED):
            self._died = f"{name} died ({reason}): make a new LLM"
            if self._directory is not None:  # Else it died before there was one.
                self._directory.changed()
            with suppress(RuntimeError):  # The loop has ended.
                self._loop.call_soon_threadsafe(self._gone.set)


class AnswerRoom:
    """Room for so many answers at once, over all calls; one body with more of them goes alone."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def taken(self, choices: int) -> AsyncIterator[None]:
        """Wait for room for the answers of one body, and hold it."""
        async with self._changed:
            try:
                await self._changed.wait_for(lambda: not self._taken or self._taken + choices <= self._most)
                self._taken += choices
            finally:
                self._changed.notify()  # One wakes the next: of many that wait, not all for each that ends.
        try:
            yield
        finally:
            self._taken -= choices
            async with self._changed:
                self._changed.notify()


def _is_tokens(prompts: object) -> bool:
    return isinstance(prompts, Sequence) and bool(prompts) and all(isinstance(one, int) for one in prompts)


def _answers_of(told: Mapping[str, Any]) -> PromptAnswers:
    """What an answer of the endpoint says, to one prompt or chat."""
    first = told["choices"][0]
    return PromptAnswers(
        tuple(first["prompt_token_ids"] if "prompt_token_ids" in first else told["prompt_token_ids"]),
        tuple(
            Generated(
                one["text"] if "text" in one else one["message"]["content"] or "",
                tuple(one["token_ids"]),
                one["finish_reason"],
                one["stop_reason"],
                one["logprobs"],
                one.get("message"),
            )
            for one in told["choices"]
        ),
        first.get("prompt_logprobs", told.get("prompt_logprobs")),
    )
