"""Images of models that an agent keeps, and the processes that share them."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.arena.test_arena_agent import killed
from tests.support.served_cluster import ROOT, until
from twinpool.cluster.arena import shared_weights
from twinpool.cluster.arena.arena_agent import IMAGE_SEALS, IMAGES
from twinpool.cluster.arena.arena_client import ask, forget, reach
from twinpool.cluster.arena.local_agent import LocalArenaAgent
from twinpool.cluster.arena.shared_weights import SharedImages
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.ids import WorkerName
from twinpool.engine.runner.model_image import ImageUnfit

NAME = WorkerName("prefill-0")


@contextmanager
def sharing(token: str, wait_s: float = 0.1) -> Iterator[SharedImages]:
    images = SharedImages(token, wait_s, SystemClock(), time.sleep)
    try:
        yield images
    finally:
        for loan in images._loans:
            loan.end()


class Text:
    """An image that is these bytes."""

    def __init__(self, text: bytes) -> None:
        self.text, self.nbytes = text, len(text)

    def write(self, fd: int) -> None:
        os.write(fd, self.text)


class User:
    """A process of its own."""

    def __init__(self, token: str, key: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("image_user.py")), token, key],
            env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def user(token: str, key: str) -> Iterator[User]:
    one = User(token, key)
    try:
        yield one
    finally:
        one.kill()


@pytest.mark.slow
def test_one_process_makes_an_image_and_the_others_have_it(agent: LocalArenaAgent, token: str) -> None:
    with sharing(token) as maker:
        assert maker.find("a") is None
        with user(token, "a") as early:
            assert early.said == "another process has been loading this model for 0.1 s"
        memory = maker.keep("a", Text(b"....bits"))
        assert bytes(memory[-4:]) == b"bits"
        with user(token, "a") as late:
            assert late.said == "has bits"


@pytest.mark.slow
def test_who_dies_while_making_it_is_followed_by_the_next(agent: LocalArenaAgent, token: str) -> None:
    with user(token, "a") as first:
        assert first.said == "is to make it"
        with sharing(token) as second:
            with pytest.raises(ImageUnfit, match="another process"):
                second.find("a")
            first.process.kill()
            first.process.wait()
            second._wait_s = 60.0  # The agent hears of it soon.
            assert second.find("a") is None


@pytest.mark.slow
def test_an_image_outlives_who_made_it_until_another_is_asked_for(agent: LocalArenaAgent, token: str) -> None:
    """A worker that is started again finds its weights; those of the model before it take no memory any more."""
    with user(token, "a") as maker:
        assert maker.said == "is to make it"
    with sharing(token, 60.0) as restarted:  # The agent hears of the other's end soon.
        assert restarted.find("a") is None
        restarted.keep("a", Text(b"old!"))
        with user(token, "a") as one:
            assert one.said == "has old!"
        assert restarted.find("a") is not None
        assert restarted.find("b") is None  # This process uses "a" still.
        assert restarted.find("a") is not None


@pytest.mark.slow
@pytest.mark.parametrize("how", ["another is asked for", "the worker is forgotten"])
def test_what_nobody_uses_is_dropped(agent: LocalArenaAgent, token: str, how: str) -> None:
    script = (
        "import sys, time\n"
        "from twinpool.cluster.arena.shared_weights import SharedImages\n"
        "from twinpool.contracts.clock import SystemClock\n"
        "from tests.cluster.arena.test_shared_images import Text\n"
        "images = SharedImages(sys.argv[1], 0.1, SystemClock(), time.sleep)\n"
        "assert images.find('a') is None\n"
        "images.keep('a', Text(b'bits'))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script, token], env=environment, check=True, timeout=60)
    assert "a" in kept(agent)
    if how == "the worker is forgotten":
        forget(token, NAME)
    else:
        with sharing(token) as images:
            assert images.find("b") is None
    until(lambda: kept(agent) == set(), "it to be dropped")


def kept(agent: LocalArenaAgent) -> set[str]:
    """The keys of images that the agent has open."""
    assert agent.pid is not None
    files = [os.readlink(f) for f in Path(f"/proc/{agent.pid}/fd").iterdir() if f.is_symlink()]
    return {key for file in files for key in re.findall(r"twinpool-weights-(\w+)", file)}


def test_nobody_can_change_an_image(agent: LocalArenaAgent, token: str) -> None:
    with sharing(token) as images:
        assert images.find("a") is None
        images.keep("a", Text(b"bits"))
        with reach(token, SystemClock(), time.sleep) as connection:
            _, (fd,) = ask(connection, {"verb": "image", "token": token, "key": "a"})
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"!", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4)
        os.close(fd)


@pytest.mark.parametrize("lacking", [fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SHRINK, IMAGE_SEALS])
def test_an_image_that_could_be_changed_is_not_taken(agent: LocalArenaAgent, token: str, lacking: int) -> None:
    with sharing(token) as images:
        assert images.find("a") is None
        fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, IMAGE_SEALS & ~lacking)
        with reach(token, SystemClock(), time.sleep) as connection, pytest.raises(OSError, match="hung up"):
            ask(connection, {"verb": "keep", "token": token, "key": "a"}, (fd,))
        os.close(fd)


@pytest.mark.slow
def test_only_who_has_claimed_an_image_gives_it_up_and_whoever_has_one_brings_it(
    agent: LocalArenaAgent, token: str
) -> None:
    with user(token, "a") as claimer, sharing(token) as other:
        assert claimer.said == "is to make it"
        other.give_up("a", "for no good reason")
        with user(token, "a") as third:
            assert third.said == "another process has been loading this model for 0.1 s"
        assert bytes(other.keep("a", Text(b"mine"))[-4:]) == b"mine"
        with user(token, "a") as third:
            assert third.said == "has mine"


def test_all_are_told_why_there_is_no_image(agent: LocalArenaAgent, token: str) -> None:
    with sharing(token) as images:
        assert images.find("a") is None
        images.give_up("a", "its layout is the library's own")
        with user(token, "a") as other:
            assert other.said == "its layout is the library's own"


@pytest.mark.parametrize("error", [OSError("no memory left"), ImageUnfit("no memory left")])
def test_an_image_that_could_not_be_written_is_given_up_with_the_reason(
    agent: LocalArenaAgent, token: str, error: Exception
) -> None:
    """Nobody waits for who has claimed it, which lives on without one."""

    class Full:
        nbytes = 4

        def write(self, fd: int) -> None:
            raise error

    with sharing(token) as images:
        assert images.find("a") is None
        before = sorted(os.listdir("/proc/self/fd"))
        with pytest.raises(ImageUnfit, match="the weights could not be shared: no memory left"):
            images.keep("a", Full())
        assert sorted(os.listdir("/proc/self/fd")) == before, "its file is closed"
        with pytest.raises(ImageUnfit, match=r"^no memory left$"):
            images.find("a")


def test_an_image_that_cannot_be_mapped_leaves_no_file_open(
    agent: LocalArenaAgent, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("too many mappings")

    monkeypatch.setattr(shared_weights, "map_shared", fails)
    with sharing(token) as images:
        assert images.find("a") is None
        before = sorted(os.listdir("/proc/self/fd"))
        with pytest.raises(ImageUnfit, match="the weights could not be mapped: too many mappings"):
            images.keep("a", Text(b"bits"))
        assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_long_reason_is_told_in_part_and_who_has_no_agent_gives_up_in_silence(
    agent: LocalArenaAgent, token: str
) -> None:
    with sharing(token) as images:
        assert images.find("a") is None
        images.give_up("a", "x" * 100_000)
        with pytest.raises(ImageUnfit, match=r"^x{1000}$"):
            images.find("a")
    with sharing("") as images:
        try:
            images.give_up("a", "there is nobody to tell")
        except ImageUnfit as error:
            pytest.fail(f"a worker that goes on without an image failed: {error}")


def test_images_are_bounded(agent: LocalArenaAgent, token: str) -> None:
    with sharing(token) as images:
        for number in range(IMAGES):
            assert images.find(f"{number}") is None
        with pytest.raises(ImageUnfit, match=f"keeps {IMAGES} images"):
            images.find("one more")


def test_without_an_agent_there_are_none() -> None:
    with sharing("") as images, pytest.raises(ImageUnfit, match="no agent"):
        images.find("a")


@pytest.mark.slow
def test_the_next_agent_gets_the_images_of_who_lives(agent: LocalArenaAgent, token: str) -> None:
    with sharing(token) as images:
        assert images.find("a") is None
        images.keep("a", Text(b"bits"))
        killed(agent)
        until(lambda: bool(agent.poll()), "the next agent")

        def found() -> bool:
            with user(token, "a") as other:
                return other.said == "has bits"

        until(found, "the image at the next agent")
