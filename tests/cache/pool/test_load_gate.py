from contextlib import suppress

from torch import zeros

from twinpool.cache.pool.pool_set import LoadGate


class Load:
    """A completion that notes who asked for it."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen, self.done = name, seen, False

    def wait(self) -> None:
        self.seen.append(f"host waits for {self.name}")

    def order(self) -> None:
        self.seen.append(self.name)


def test_readers_of_a_layer_come_after_its_loads_and_after_no_others() -> None:
    seen: list[str] = []
    gate = LoadGate([{"k": zeros(1)}, {"k": zeros(1)}])
    first, second = Load("first", seen), Load("second", seen)
    gate.expect(1, first)
    gate.expect(1, second)
    passage = gate.enter("full")
    assert passage.gates == {("full", 1): (first, second)}
    passage.layer(0)
    assert seen == []
    passage.layer(1)
    assert seen == ["first", "second"]


def test_every_reader_is_ordered_until_the_host_knows_that_the_load_is_complete() -> None:
    seen: list[str] = []
    gate = LoadGate([{"k": zeros(1)}])
    load = Load("load", seen)
    gate.expect(0, load)
    gate.enter("full").layer(0)
    late = gate.enter("full")
    load.done = True
    gate.enter("full").layer(0)
    late.layer(0)
    assert seen == ["load"] * 2
    assert gate.pending(0) == ()


def test_a_step_waits_for_the_loads_of_its_launch_and_for_no_later_ones() -> None:
    seen: list[str] = []
    gate = LoadGate([{"k": zeros(1)}])
    passage = gate.enter("full")
    gate.expect(0, Load("later", seen))
    passage.layer(0)
    assert seen == []


class FailedLoad(Load):
    def order(self) -> None:
        super().order()
        raise RuntimeError("an illegal address was touched")


def test_a_step_goes_on_behind_a_load_that_failed_and_is_behind_the_others_all_the_same() -> None:
    """Requests of the step that rely on it are told before they commit; the others have nothing to do with it."""
    seen: list[str] = []
    gate = LoadGate([{"k": zeros(1)}])
    gate.expect(0, FailedLoad("failed", seen))
    gate.expect(0, Load("whole", seen))
    given: object = None
    with suppress(RuntimeError):
        given = gate.enter("full").layer(0)
    assert given is not None
    assert seen == ["failed", "whole"]


def test_the_host_waits_where_it_reads_itself() -> None:
    seen: list[str] = []
    gate = LoadGate([{"k": zeros(1)}])
    gate.expect(0, Load("load", seen))
    gate.layer(0)
    assert seen == ["host waits for load"]
