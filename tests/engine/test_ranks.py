"""Tensor-parallel ranks as processes over gloo: sums that depend on the ranks alone, and one that dies."""

from __future__ import annotations

import ipaddress
import os
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.rank_process import part
from tests.support.rank_subprocess import Process
from twinpool.contracts.errors import PeerDead
from twinpool.engine.runner.load_model import agreed
from twinpool.engine.tensors.row_exact_linear import Numerics
from twinpool.engine.tensors.tensor_parallel import ALONE, TorchDistributedGroup

DEADLINE_S = 0.2
SCRIPT = Path(__file__).parents[2] / "tests" / "engine" / "rank_process.py"


def listening(pid: int) -> list[str]:
    """The addresses of a process's listening TCP sockets, by the kernel's tables."""
    files = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    own = {name.removeprefix("socket:[").removesuffix("]") for name in files if name.startswith("socket:[")}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in own:  # Listening.
                address = bytes.fromhex(fields[1].partition(":")[0])
                words = b"".join(address[i : i + 4][::-1] for i in range(0, len(address), 4))
                found.append(str(ipaddress.ip_address(words)))
    return found


def _all(ranks: list[Process], line: str) -> list[dict[str, Any]]:
    for rank in ranks:
        rank.tell(line)
    return [rank.hear() for rank in ranks]


def test_parts_of_a_sum_are_rounded_once_and_not_with_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = torch.tensor([[256.0], [0.5], [0.5], [0.5]]).bfloat16()  # Neighbours of 256 are two apart in bfloat16.
    group = TorchDistributedGroup.__new__(TorchDistributedGroup)
    group._device, group._exact = torch.device("cpu"), True
    monkeypatch.setattr(group, "_gathered", lambda x, within=None: parts)
    assert group.sum(parts[0]).tolist() == [258.0]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_c3_sums_are_in_the_order_of_the_ranks_for_any_rows_and_a_dead_rank_ends_the_others(
    size: int, tmp_path: Path
) -> None:
    ranks = [Process(SCRIPT, tmp_path / "store", rank, size) for rank in range(size)]
    try:
        assert all(rank.hear()["ready"] for rank in ranks)
        listens = [address for rank in ranks for address in listening(rank.process.pid)]
        assert listens
        assert set(listens) == {"127.0.0.1"}, "gloo authenticates nobody"
        for dtype in (torch.float32, torch.bfloat16):
            for rows in (1, 3, 128):
                name = str(dtype).removeprefix("torch.")
                total = part(0, 7, rows, dtype).float()
                for number in range(1, size):
                    total = total + part(number, 7, rows, dtype).float()
                answers = [torch.tensor(heard["sum"]) for heard in _all(ranks, f"sum 7 {rows} {name}")]
                assert all(torch.equal(answer, total.to(dtype).float()) for answer in answers)
        for rank in ranks:
            rank.tell(f"first {rank.rank + 5}")
        assert [rank.hear()["first"] for rank in ranks] == [[5]] * size
        for rank in ranks:
            rank.tell(f"gather {rank.rank}")
        assert [rank.hear()["gather"] for rank in ranks] == [[[n] for n in range(size)]] * size
        for rank in ranks:
            rank.tell("outlive")
        ranks[-1].process.kill()
        assert all("a rank of this worker is gone" in rank.hear()["dead"] for rank in ranks[:-1])
    finally:
        for rank in ranks:
            rank.end()


def test_a_rank_that_loads_for_longer_than_an_answer_may_take_is_waited_for() -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]

    def met(number: int) -> TorchDistributedGroup:
        return TorchDistributedGroup(store, number, 2, deadline_s=DEADLINE_S, start_s=60.0)

    with ThreadPoolExecutor(2) as threads:
        early, late = threads.map(met, (0, 1))
        loaded = threads.submit(early.gather, torch.tensor([0]), loading=True)
        done, _ = wait([loaded], 3 * DEADLINE_S)
        assert not done, "any other collective would have given up"
        assert [found.tolist() for found in late.gather(torch.tensor([1]), loading=True)] == [[0], [1]]
        assert [found.tolist() for found in loaded.result(60)] == [[0], [1]]
        gone = threads.submit(early.gather, torch.tensor([0]))
        with pytest.raises(PeerDead, match="a rank of this worker is gone"):
            gone.result(60)
    for group in (early, late):
        group.close()


def test_nccl_is_told_to_meet_on_loopback_alone_before_it_begins_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL reads its environment once, when the first group of a process is made."""
    told: dict[str, str] = {}

    class Nccl:
        class Options:
            _timeout = timedelta()

        def __init__(self, *args: object) -> None:
            told.update({name: value for name, value in os.environ.items() if name.startswith("NCCL_")})

    for name in ("NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_RAS_ENABLE"):
        monkeypatch.setenv(name, "eth0")
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    TorchDistributedGroup(store, 0, 1, device=torch.device("cuda"))
    assert told == {"NCCL_SOCKET_IFNAME": "=lo", "NCCL_IB_DISABLE": "1", "NCCL_RAS_ENABLE": "0"}


def test_one_rank_alone_has_nothing_to_add_or_to_wait_for() -> None:
    x = torch.randn(3, 5)
    assert ALONE.sum(x) is x
    assert ALONE.first(x) is x
    assert ALONE.gather(x)[0] is x


class Said:
    """Ranks that have said what they found."""

    rank, size = 0, 2

    def __init__(self, other: list[int]) -> None:
        self._other = other

    def gather(self, x: torch.Tensor, *, loading: bool = False) -> list[torch.Tensor]:
        assert loading, "each has loaded at its own speed"
        return [x, torch.tensor(self._other)]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    first = sum

    def send(self, x: torch.Tensor, to: int) -> None:
        raise NotImplementedError

    def receive(self, like: torch.Tensor, sender: int) -> torch.Tensor:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("mine", "other", "both"),
    [
        (Numerics(4), [0, 8], Numerics(8)),
        (Numerics(8), [0, 4], Numerics(8)),
        (Numerics(4), [1, 16], Numerics(16, tiled=True)),
        (Numerics(16, tiled=True), [0, 4], Numerics(16, tiled=True)),
    ],
)
def test_c3_all_ranks_pad_their_batches_as_the_one_that_needs_it_most(
    mine: Numerics, other: list[int], both: Numerics
) -> None:
    assert agreed(mine, Said(other), torch.device("cpu")) == both
