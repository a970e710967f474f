"""The cluster of deploy/ray/autoscaled.yaml, on hosts that share nothing but the network.

Two hosts serve, over the plane `zmq`, with every socket protected (configs/secure.yaml). Under load Ray's autoscaler
starts the third, and takes it back. Then, with streams under way, every host is cordoned and drained in turn, and all
goes on in another build. Every answer is compared with transformers, and none may be lost.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.rayup import remote
from tests.rayup.hosts import Host, hosts, prove_apart
from tests.rayup.machine import operator, phase, ray, say, stop, strangers, wait_for
from tests.rayup.remote import Remote, nodes_alive, words_of
from tests.rayup.strangers import prove_closed
from tests.rayup.wire import watched
from tests.support import changing_cluster
from tests.support.changing_cluster import Load, command, some_prompts
from tests.support.checkpoints import Oracle, compare, make_checkpoint
from tests.support.served_cluster import until
from twinpool.contracts.cluster_secret import access_token

HEAD, OTHER, LATER = "one", "two", "three"
HOSTS = {HEAD: "10.0.0.10", OTHER: "10.0.0.11", LATER: "10.0.0.12"}
POOLS = ["--prefill 2", "--decode 2"]
SECTIONS: dict[str, dict[str, Any]] = {
    "cache": {"page_tokens": 16},
    "decode": {"cache.device_tokens": 2048},
    "prefill": {"cache.device_tokens": 8192, "chunk_tokens": 128},
    "engine": {"threads": 1, "attention": "torch"},
    "cluster": {"lease_s": 8, "start_timeout_s": 300},
    "faults": {"step_delay_s": 0.04},
    "autoscaling": {
        "enabled": "true", "prefill.min_workers": 2, "prefill.max_workers": 2, "decode.min_workers": 2,
        "decode.max_workers": 3, "ttft_target_s": 100, "itl_target_s": 100, "period_s": 1, "window_s": 4,
        "shrink_window_s": 40, "grow_cooldown_s": 1, "shrink_cooldown_s": 2, "role_window_s": 600, "hold_s": 86400,
    },
}  # fmt: skip
START_S = 400.0
NODE_S = 280.0
"""How long a host may take from the need for it to a worker that serves there, and back."""
POLL_S = 1.0
STREAM_TOKENS = 300
MANY, SOME, FEW = 16, 6, 2


class Rehearsal:
    """One run, and what its phases share."""

    def __init__(self, there: dict[str, Host], home: Path, took: dict[str, float]) -> None:
        self.there, self.home, self.took = there, home, took
        self.head = there[HEAD]
        self.model = make_checkpoint(home / "checkpoint", "qwen3", seed=61)
        self.oracle = Oracle(self.model)
        self.secret = secrets.token_hex(remote.SECRET_BYTES)
        self.answers = 0

    def run(self) -> None:
        launch = self.launch()
        self.refuse()
        with phase("serve", self.took):
            shown = remote.serve(self.head, self.secret, POOLS, SECTIONS, START_S)
            assert "pages go by zmq" in shown, shown
            assert "in the clear" not in shown, shown
            self.cluster = Remote(self.head, self.home, self.access)
        for name, part in self.phases():
            with phase(name, self.took):
                part()
        with phase("down", self.took):
            command(self.cluster, "down")
            self.down(launch)

    def phases(self) -> list[tuple[str, Callable[[], None]]]:
        return [
            ("wire and strangers", self.prove_wire),
            ("a host more under load", self.grow),
            ("a host less", self.shrink),
            ("every host drained in turn", self.drain_all),
            ("another build", self.upgrade),
        ]

    # ------------------------------------------------------------ Ray

    def launch(self) -> Path:
        with phase("ray up", self.took):
            self.access = remote.write_credentials(self.home, self.head.address)
            launch = remote.write_launch(self.home, self.model)
            ray("up", "-y", "--no-config-cache", str(launch), tries=3)
            until(lambda: nodes_alive(self.head) == [HEAD, OTHER], "two nodes", NODE_S, POLL_S)
            return launch

    def down(self, launch: Path) -> None:
        ray("down", "-y", str(launch))
        # The other nodes end by themselves, as they can't reach the head any more, but for Ray's log monitor.
        for one in self.there.values():
            one.output("ray stop")
        own = {1, os.getpid()}
        for one in self.there.values():
            own |= {one.process.pid, one.first, *_sshd_of(one)}
        wait_for(lambda: not strangers(own), 90, lambda: f"the hosts to be empty: {strangers(own)}")

    def refuse(self) -> None:
        """A plane of one host is refused, before anything is started."""
        with phase("planes of one host are refused", self.took):
            done = remote.start(self.head, self.secret, POOLS, {**SECTIONS, "transfer": {"plane": "shm"}}, START_S)
            assert done.returncode != 0, done.stdout
            assert "transfer.plane=shm" in done.stdout + done.stderr, done.stdout + done.stderr

    # ------------------------------------------------------------ the wire

    def prove_wire(self) -> None:
        """Pages cross the cable, nobody can read prompts or keys there, and strangers are let in nowhere."""
        rng = random.Random(1)
        # Of many lengths, so that not all go to a pair of workers on one host.
        prompts = [[rng.randrange(3, 120) for _ in range(rng.randint(64, 400))] for _ in range(24)]
        # Tokens below 128 are one byte each where they go as numbers.
        marks = {f"prompt {n}": bytes(prompt[:64]) for n, prompt in enumerate(prompts)}
        marks |= {"a client's key": self.access.key.encode(), "the secret": self.secret.encode()}
        marks |= {"its token": access_token(self.secret).encode()}
        other = self.there[OTHER]
        self.prove_sight(other, marks)
        before = other.bytes_crossed()
        with watched(other.link, marks) as wire, watched(self.head.link, marks) as at_head:
            answers = self.cluster.complete_all(prompts, at_once=7, max_tokens=32)
        assert not wire.seen | at_head.seen, f"in the clear: {wire.seen | at_head.seen}"
        for prompt, answer in zip(prompts, answers, strict=True):
            assert compare(self.oracle, prompt, answer.tokens).equal
        at = {row["name"]: row["node"] for row in self.cluster.rows()}
        ways = [(at[a.twinpool["prefill_worker"]], at[a.twinpool["decode_worker"]]) for a in answers]
        pages = sum(a.twinpool["transfer_bytes"] for a, way in zip(answers, ways, strict=True) if len(set(way)) == 2)
        assert pages, f"no prompt was handed over from host to host: {ways}"
        assert min(wire.total, other.bytes_crossed() - before) > pages, (wire.total, pages)
        say(f"{wire.total:,} bytes crossed the cable of {other.name}, {pages:,} of them pages from host to host")
        ports, curve = prove_closed(other.address, other.first, self.secret)
        say(f"strangers are let in at none of the {ports} ports of {other.name}'s workers, {curve} of them CURVE's")

    def prove_sight(self, other: Host, marks: dict[str, bytes]) -> None:
        """Whoever watches sees each of these marks where it goes in the clear."""
        with watched(other.link, marks) as wire:
            for mark in marks.values():
                with socket.create_connection((other.address, 22), timeout=5) as plain:
                    plain.sendall(mark)
        assert wire.seen == set(marks), f"not seen: {set(marks) - wire.seen}"

    # ------------------------------------------------------------ the pool follows the load, hosts the pool

    def load(self, streams: int, seed: int) -> Load:
        return Load(
            self.cluster.url, self.cluster.model, some_prompts(3), streams=streams, seed=seed, access=self.access,
            tokens=STREAM_TOKENS,
        )  # fmt: skip

    def judge(self, load: Load) -> None:
        load.verify(self.oracle)
        assert not load.resumed, "a connection broke"
        self.answers += len(load.answers)
        say(f"{len(load.answers)} answers, all exact")

    def serving_on(self, host: str, role: str) -> bool:
        return any(r["node"] == host and r["role"] == role and r["state"] == "ready" for r in self.cluster.rows())

    def grow(self) -> None:
        """The load takes more decode workers than there are places: Ray starts the third host for one."""
        load = self.load(MANY, 1)
        with load.running():
            self.wait(lambda: self.serving_on(LATER, "decode"), f"a decode worker on {LATER}")
            load.more()
        self.judge(load)
        assert nodes_alive(self.head) == sorted(HOSTS)
        deaths = [row["name"] for row in self.cluster.rows() if row["last_end"]]
        assert not deaths, f"died: {deaths}"

    def shrink(self) -> None:
        """The load falls: the worker leaves, and Ray takes the host back."""
        load = self.load(FEW, 2)
        with load.running():
            self.wait(lambda: not self.cluster.on(LATER), f"the worker on {LATER} to leave")
            self.wait(lambda: nodes_alive(self.head) == [HEAD, OTHER], f"{LATER} to be given back")
        self.judge(load)

    def wait(self, true: Callable[[], bool], what: str) -> None:
        try:
            until(true, what, NODE_S, POLL_S)
        except AssertionError as error:
            shown = self.cluster.twinpool("status")
            stop(f"{error}\n{shown.stdout}{shown.stderr}{words_of(self.head)}")

    # ------------------------------------------------------------ nodes

    def drain_all(self) -> None:
        """Every host in turn: all of it moves to the others, nothing lands there, and it comes back."""
        command(self.cluster, "scale", "prefill=2", "decode=3", within_s=NODE_S)
        load = self.load(SOME, 3)
        with load.running():
            for host in HOSTS:
                load.more()
                command(self.cluster, "cordon", host)
                self.drain(host, load)
            load.more()
        self.judge(load)
        moved = self.cluster.metric("twinpool_migrations_total", outcome="migrated")
        again = self.cluster.metric("twinpool_replays_total")
        assert moved, "no stream has moved"
        assert not again, f"{again:g} requests were started over"
        say(f"{moved:g} running streams moved from host to host, none was started over")

    def drain(self, host: str, load: Load) -> None:
        before = self.cluster.on(host)
        assert before, f"nothing runs on {host}"
        command(self.cluster, "drain", host)
        assert not self.cluster.on(host)
        load.more(SOME)
        assert not self.cluster.on(host)
        command(self.cluster, "undrain", host)
        self.wait(lambda: self.whole() and self.serving_on(host, "decode"), f"all workers to serve, some on {host}")
        say(f"{host}: {', '.join(before)} left, {', '.join(self.cluster.on(host))} serve there again")

    def whole(self) -> bool:
        """Whether both pools have their workers, and all serve."""
        there = [row for row in self.cluster.rows() if row["state"] != "left"]
        return len(there) == 5 and all(row["state"] == "ready" for row in there)

    def upgrade(self) -> None:
        folder = self.home.parent / "next"
        python = changing_cluster.another_build(folder)
        for one in self.there.values():
            one.send_files(folder)
        load = self.load(SOME, 4)
        with load.running():
            load.more()
            command(self.cluster, "upgrade", "--python", str(python), within_s=changing_cluster.UPGRADE_S)
            load.more()
        self.judge(load)
        builds = {row["build"] for row in self.cluster.rows() if row["state"] != "left"}
        assert len(builds) == 1
        self.cluster.settle()


def _sshd_of(host: Host) -> list[int]:
    return [child.pid for child in psutil.Process(host.first).children() if "sshd" in " ".join(child.cmdline())]


def rehearse() -> None:
    took: dict[str, float] = {}
    remote.environment_of_commands()
    with operator() as home:
        with hosts(home, HOSTS) as there:
            with phase("nothing is shared", took):
                prove_apart(there)
            run = Rehearsal(there, home, took)
            run.run()
        for name, seconds in took.items():
            say(f"{seconds:7.1f} s  {name}")
        say(f"{run.answers} answers, all exact; nothing left running")
