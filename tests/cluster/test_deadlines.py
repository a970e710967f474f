"""Every wait of the cluster's code has a deadline, or a reason for none that is written here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "cluster"
WAITS = {"wait", "join", "result", "acquire", "communicate", "accept", "recv", "wait_for", "get"}
ENDLESS = {
    "arena_agent.py: self._listener.accept": "the selector has said that somebody is there",
    "build_parts.py: line.ask(AwaitReady(), config.cluster.start_timeout_s).wait": "the line's own deadline",
    "worker_process.py: self._group.line.ask(LeaveRole()).wait": "the line's own deadline",
    "build_parts.py: line.ask(BindArenas(b'')).wait": "the line's own deadline",
    "build_parts.py: line.ask(BindArenas(fresh)).wait": "the line's own deadline",
    "dashboard_feed.py: watcher.more.wait": "until there is a frame, or the viewer's stream ends",
    "controller_service.py: line.more.wait": "until the table changes, or the watcher's stream ends",
    "dashboard_feed.py: ask.over.wait": "within the question's deadline",
    "controller_streams.py: self._more.wait": "until there are orders, or the supervisor's stream ends",
    "supervisor.py: reports.get": "until there is something to report, or the stream to the controller ends",
    "controller_streams.py: self._there.wait": "within the answer's deadline",
    "examine.py: group.result": "checks, each of which asks with deadlines of its own",
    "offline_llm.py: task.result": "of a task that has ended",
    "offline_llm.py: future.result": "the call's own deadline, which the loop keeps",
    "offline_llm.py: self._submitted(work, timeout_s).result": "the call's own deadline, which the loop keeps",
    "offline_llm.py: self._gone.wait": "until a worker dies, or the call ends, which has a deadline",
    "priority.py: thread.join": "the package's import and the model's loading, which cluster.start_timeout_s bounds",
    "worker_actor.py: mine.wait": "the actor's process, whose end is what a caller waits for, or the next caller",
    "worker_process.py: self._ended.wait": "the worker's life; its lease, its engine thread and its parent end it",
}


def calls() -> Iterator[tuple[str, ast.Call]]:
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                yield path.name, node


def test_every_wait_has_a_deadline_or_a_reason_for_none() -> None:
    endless = set()
    for name, call in calls():
        assert isinstance(call.func, ast.Attribute)
        bounded = bool(call.keywords) or bool(call.args)
        if call.func.attr in WAITS and not bounded:
            endless.add(f"{name}: {ast.unparse(call.func)}")
        if ast.unparse(call.func) in ("ray.get", "ray.wait"):
            assert "timeout" in [k.arg for k in call.keywords], f"{name}: {ast.unparse(call)}"
    assert not endless - ENDLESS.keys(), "give it a deadline, or write the reason above"
    assert not ENDLESS.keys() - endless, "a reason for a wait that is no more"
