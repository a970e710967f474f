"""State tables: what isn't in one can't happen, and a state that leads nowhere is found."""

from __future__ import annotations

from enum import StrEnum

import pytest

from twinpool.contracts.errors import IllegalTransition
from twinpool.contracts.state_table import StateTable


class State(StrEnum):
    NEW = "new"
    OPEN = "open-wide"
    WAITS = "waits"
    TURNS = "turns"
    DONE = "done"
    FAILED = "failed"


class Happens(StrEnum):
    GO = "go"
    STOP = "stop"


SOUND = {
    State.NEW: {Happens.GO: State.OPEN},
    State.OPEN: {Happens.GO: State.WAITS, Happens.STOP: State.FAILED},
    State.WAITS: {Happens.GO: State.OPEN, Happens.STOP: State.DONE},
}


def test_an_event_leads_where_its_row_says_and_any_other_raises_with_its_names() -> None:
    table = StateTable("rooms", SOUND)
    for state, row in SOUND.items():
        for event in Happens:
            if event in row:
                assert table.next(state, event) is row[event]
            else:
                with pytest.raises(IllegalTransition, match=rf"rooms: {event} can't happen in state {state}"):
                    table.next(state, event)
    with pytest.raises(IllegalTransition):
        table.next(State.DONE, Happens.GO)
    assert [state for state in State if table.terminal(state)] == [State.TURNS, State.DONE, State.FAILED]
    assert StateTable("rooms", {**SOUND, State.DONE: {}}).terminal(State.DONE), "a row without events is none"


def test_states_from_which_no_end_can_be_reached_are_found_and_no_others() -> None:
    """Those that only lead to each other, and those that only lead to them; an end may be many steps away."""
    assert StateTable("sound", SOUND).dead_ends() == []
    chain = dict(zip(list(State)[:-1], ({Happens.GO: state} for state in list(State)[1:]), strict=True))
    for rows in (chain, dict(reversed(chain.items()))):
        assert StateTable("long", rows).dead_ends() == []
    circle = {
        State.NEW: {Happens.GO: State.WAITS, Happens.STOP: State.OPEN},
        State.OPEN: {Happens.GO: State.DONE},
        State.WAITS: {Happens.GO: State.TURNS},
        State.TURNS: {Happens.GO: State.WAITS},
    }
    assert StateTable("circle", circle).dead_ends() == [State.WAITS, State.TURNS]
    assert StateTable("no end", {State.NEW: {Happens.GO: State.NEW}}).dead_ends() == [State.NEW]
    only = {State.NEW: {Happens.GO: State.WAITS}, State.WAITS: {Happens.GO: State.WAITS}}
    assert StateTable("into it", only).dead_ends() == [State.NEW, State.WAITS]


def test_a_diagram_has_every_line_of_the_table_and_every_end_once() -> None:
    assert StateTable("rooms", SOUND).diagram().splitlines() == [
        "stateDiagram-v2",
        "    [*] --> new",
        '    state "open-wide" as open_wide',
        "    new --> open_wide: go",
        "    open_wide --> waits: go",
        "    open_wide --> failed: stop",
        "    waits --> open_wide: go",
        "    waits --> done: stop",
        "    failed --> [*]",
        "    done --> [*]",
    ]
