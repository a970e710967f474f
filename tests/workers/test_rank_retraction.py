"""Workers of several ranks: what their leader retracts, the followers retract with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import Oracle
from tests.support.layout_scenes import check_retracted
from tests.support.rank_followers import RankProcesses


@pytest.mark.slow
def test_every_ranks_share_of_a_retracted_request_comes_back(model: Path, oracle: Oracle, warm: RankProcesses) -> None:
    check_retracted(model, oracle, warm, {"tp": 2})
