from torch import zeros

from cache.gate import Gate


class Load:
    """A completion that notes who asked for it."""

    def __init__(self, name: str, seen: list[str], *, done: bool = True) -> None:
        self.name, self.seen, self.done = name, seen, done

    def wait(self) -> None:
        raise AssertionError("the host must not wait for a load")

    def order(self) -> None:
        self.seen.append(self.name)


def test_readers_of_a_layer_come_after_its_loads_and_after_no_others() -> None:
    seen: list[str] = []
    gate = Gate([{"k": zeros(1)}, {"k": zeros(1)}])
    first, second = Load("first", seen), Load("second", seen)
    gate.expect(1, first)
    gate.expect(1, second)
    assert gate.pending(1) == (first, second)
    assert gate.gates("full") == {("full", 1): (first, second)}
    gate.layer(0)
    assert seen == []
    gate.layer(1)
    gate.layer(1)
    assert seen == ["first", "second"]
    assert gate.gates("full") == {}


def test_a1_every_reader_is_ordered_until_the_load_is_known_to_be_complete() -> None:
    seen: list[str] = []
    gate = Gate([{"k": zeros(1)}])
    load = Load("load", seen, done=False)
    gate.expect(0, load)
    gate.layer(0)
    gate.layer(0)
    load.done = True
    gate.layer(0)
    gate.layer(0)
    assert seen == ["load"] * 3
