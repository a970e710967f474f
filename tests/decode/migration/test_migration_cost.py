"""What migrating a request costs, and what finishing it here would."""

from __future__ import annotations

from twinpool.decode.migration.drain_offers import FIRST_BYTES_PER_S, MigrationCosts
from twinpool.decode.retraction.memory_pressure import KNOWN, OutputLengths


def test_finishing_is_chosen_where_it_is_quicker_than_moving() -> None:
    costs = MigrationCosts(OutputLengths(0.5, 64))
    megabytes = 100 * 1000 * 1000
    assert costs.worth_migrating(megabytes, 100, 0.01), "0.2 s against 1 s"
    assert not costs.worth_migrating(megabytes, 10, 0.01)
    for _ in range(60):
        costs.migrated(megabytes, 10.0)
    assert costs.bytes_per_s < FIRST_BYTES_PER_S / 20
    assert not costs.worth_migrating(megabytes, 100, 0.01), "moves turned out to be slow"


def test_an_answer_that_is_nearly_done_is_not_worth_moving_however_long_it_might_get() -> None:
    lengths = OutputLengths(0.5, 64)
    costs = MigrationCosts(lengths)
    assert costs.worth_migrating(100_000_000, 100, 0.01)
    for _ in range(KNOWN):
        lengths.ended(10)
    assert not costs.worth_migrating(100_000_000, 100, 0.01), "answers turned out to be short"
