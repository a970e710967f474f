"""A rank of a seat as a process of its own: `gloo_rank.py STORE RANK SIZE`; told what to do and tells it, by lines."""

import json
import os
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from cache.consensus import Ballot
from cache.gloo_group import GlooGroup
from contracts.clock import SystemClock
from contracts.errors import PeerDead

AHEAD = 3


def tell(**what: object) -> None:
    print(json.dumps(what), flush=True)


def main(path: str, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(path, size)
    store.set_timeout(timedelta(seconds=60))
    ballot = Ballot(GlooGroup(store, rank, size, deadline_s=60.0), SystemClock(), ahead=AHEAD, deadline_s=60.0)
    pause = threading.Event()
    tell(ready=True)
    for line in sys.stdin:
        match line.split():
            case ["agree", key, value]:
                ballot.open(key)
                ballot.propose(key, int(value))
                number = ballot.completed + 1
                assert ballot.exchange().posted
                while (decisions := ballot.take(number)) is None:
                    pause.wait(0.001)
                tell(decisions=[[d.key, d.value, d.round] for d in decisions])
            case ["ahead"]:
                began = time.monotonic()
                count = 0
                while ballot.exchange().posted:
                    count += 1
                tell(posted=count, longest_s=time.monotonic() - began)
            case ["settle"]:
                while ballot.poll() < AHEAD + 1:
                    pause.wait(0.001)
                tell(completed=ballot.completed)
            case ["outlive"]:
                began = time.monotonic()
                try:
                    while True:
                        ballot.exchange()
                        pause.wait(0.001)
                except PeerDead as error:
                    tell(dead=str(error), after_s=time.monotonic() - began)
                # As a worker does that lost a rank: it ends, which its own peers notice.
                ballot.leave()
                os._exit(0)
            case ["end"]:
                ballot.leave()
                return


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
