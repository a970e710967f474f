from torch import zeros

from cache.gate import Gate


def test_the_next_reader_of_a_layer_waits_for_its_loads_and_no_other_does() -> None:
    loads: list[str] = []
    gate = Gate([{"k": zeros(1)}, {"k": zeros(1)}])
    gate.expect(1, lambda: loads.append("first"))
    gate.expect(1, lambda: loads.append("second"))
    gate.layer(0)
    assert loads == []
    gate.layer(1)
    gate.layer(1)
    assert loads == ["first", "second"]
