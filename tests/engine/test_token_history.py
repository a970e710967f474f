"""Token histories on the device: what a draw reads is what its request has, whatever became of steps before."""

from __future__ import annotations

import random

import pytest
import torch

from twinpool.engine.runner.device_rows import (
    DeviceRows,
    DeviceTokenHistories,
    EnteredTokens,
    PlannedHistories,
    TokenHistory,
)

CPU = torch.device("cpu")


@pytest.fixture(params=["written", "scattered"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DeviceTokenHistories:
    """Brought up to date as a CPU does it, and as a GPU does."""
    if request.param == "scattered":
        monkeypatch.setattr(DeviceRows, "_write", DeviceRows._scatter)
    return DeviceTokenHistories(CPU)


def listed(kept: DeviceTokenHistories, planned: PlannedHistories) -> list[list[int]]:
    tokens = kept.read(planned, planned.sequences).tolist()
    return [row[:length] for row, length in zip(tokens, planned.lengths, strict=True)]


class Request:
    """A request whose tokens are drawn by steps that the host hears of later."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.drawn = [rng.randrange(1000) for _ in range(rng.randint(2, 90))]
        """All tokens, those that the host doesn't know yet as well."""
        self.history = TokenHistory(list(self.drawn))
        self.launched = len(self.drawn) - 1

    def commit(self) -> None:
        """The host hears of what was drawn."""
        self.history.tokens += self.drawn[len(self.history.tokens) :]

    def drop(self) -> None:
        """What steps under way have drawn is nothing: the request goes on from what the host knows, and may well draw
        something else."""
        del self.drawn[len(self.history.tokens) :]
        self.launched = len(self.drawn) - 1


@pytest.mark.parametrize("seed", range(8))
def test_each_draw_reads_all_tokens_before_it_also_those_that_the_host_does_not_know(
    kept: DeviceTokenHistories, seed: int
) -> None:
    """Requests come and go, hear late of what they drew, lose steps under way, and have drafts that are all rejected;
    rows are in any order, beside others that draw without a history."""
    rng = random.Random(seed)
    requests = [Request(rng) for _ in range(4)]
    for _ in range(150):
        requests = [one for one in requests if rng.random() < 0.97]
        while len(requests) < 3:
            requests.append(Request(rng))
        for one in requests:
            if len(one.drawn) - len(one.history.tokens) >= 2 or rng.random() < 0.5:
                one.commit()
            elif rng.random() < 0.1:
                one.drop()
        chosen = rng.sample(requests, rng.randint(1, len(requests)))
        order = rng.sample(range(2 * len(chosen)), len(chosen))
        step = dict(zip(order, chosen, strict=True))
        tokens = torch.full((6 * 2 * len(chosen),), 7)
        drafts = {sequence: [rng.randrange(1000) for _ in range(rng.choice((0, 0, 1, 4)))] for sequence in step}
        entered: dict[int, EnteredTokens] = {}
        for sequence, one in step.items():
            mine = [one.drawn[one.launched], *drafts[sequence]]
            entered[sequence] = EnteredTokens(one.history, one.launched, 6 * sequence + 1, len(mine))
            tokens[entered[sequence].at : entered[sequence].at + len(mine)] = torch.tensor(mine)
        planned = kept.plan(entered)
        kept.update(planned, tokens)
        want = {sequence: [*one.drawn[: one.launched + 1], *drafts[sequence]] for sequence, one in step.items()}
        assert listed(kept, planned) == list(want.values())
        some = rng.sample(planned.sequences, rng.randint(1, len(planned.sequences)))
        for sequence, row in zip(some, kept.read(planned, some).tolist(), strict=True):
            assert row[: len(want[sequence])] == want[sequence]
        for one in chosen:
            one.drawn.append(rng.randrange(1000))
            one.launched += 1


def test_a_step_that_was_not_launched_leaves_its_tokens_to_the_next(kept: DeviceTokenHistories) -> None:
    history = TokenHistory([5, 6, 7])
    kept.undo(kept.plan({0: EnteredTokens(history, 2, 0, 1)}))
    planned = kept.plan({0: EnteredTokens(history, 2, 0, 1)})
    kept.update(planned, torch.tensor([7]))
    assert listed(kept, planned) == [[5, 6, 7]]


def test_a_token_that_nobody_knows_is_not_read() -> None:
    kept, history = DeviceTokenHistories(CPU), TokenHistory([5, 6, 7])
    with pytest.raises(AssertionError, match="known to nobody"):
        kept.plan({0: EnteredTokens(history, 4, 0, 1)})


def test_a_row_has_room_for_a_token_that_only_the_device_knows(kept: DeviceTokenHistories) -> None:
    """The first that is one more than there is room for, too."""
    history = TokenHistory(list(range(64)))
    for last, token in ((63, 63), (64, 900), (65, 901)):
        planned = kept.plan({0: EnteredTokens(history, last, 0, 1)})
        kept.update(planned, torch.tensor([token]))
    assert listed(kept, planned) == [[*range(64), 900, 901]]
