"""A rank as a process of its own: `rank_process.py STORE RANK SIZE`; told what to do by lines, and answers by lines."""

import json
import sys
from datetime import timedelta

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from twinpool.contracts.errors import PeerDead
from twinpool.engine.tensors.tensor_parallel import TorchDistributedGroup


def tell(**what: object) -> None:
    print(json.dumps(what), flush=True)


def part(rank: int, seed: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    scale: int = 10 ** (3 * (rank % 2))
    return (torch.randn(rows, 24, generator=generator) * scale).to(dtype)


def main(path: str, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    store = FileStore(path, size)
    store.set_timeout(timedelta(seconds=60))
    ranks = TorchDistributedGroup(store, rank, size, deadline_s=60.0)
    tell(ready=True)
    for line in sys.stdin:
        match line.split():
            case ["sum", seed, rows, dtype]:
                x = part(rank, int(seed), int(rows), getattr(torch, dtype))
                tell(sum=ranks.sum(x).float().tolist())
            case ["first", value]:
                tell(first=ranks.first(torch.tensor([int(value)])).tolist())
            case ["gather", value]:
                tell(gather=[x.tolist() for x in ranks.gather(torch.tensor([int(value)], dtype=torch.int16))])
            case ["outlive"]:
                try:
                    while True:
                        ranks.sum(torch.ones(4))
                except PeerDead as error:
                    tell(dead=str(error))
                return


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
