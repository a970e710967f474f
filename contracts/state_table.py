"""State tables: which event is legal in which state, and where it leads.

A table describes a life cycle completely. An event that isn't in the table raises and changes nothing; terminal states
are final; `dead_ends` lists the states that can't reach one.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

from twinpool.contracts.errors import IllegalTransition

StateT = TypeVar("StateT", bound=StrEnum)
EventT = TypeVar("EventT", bound=StrEnum)


class StateTable(Generic[StateT, EventT]):
    """`rows[state][event]` is the next state; a state with no row is terminal."""

    def __init__(self, name: str, rows: Mapping[StateT, Mapping[EventT, StateT]]) -> None:
        self.name = name
        self.rows = rows

    def next(self, state: StateT, event: EventT) -> StateT:
        """Return the state that `event` leads to. Raises `IllegalTransition` when `event` can't happen in `state`."""
        following = self.rows.get(state, {}).get(event)
        if following is None:
            raise IllegalTransition(f"{self.name}: {event} can't happen in state {state}")
        return following

    def terminal(self, state: StateT) -> bool:
        return not self.rows.get(state)

    def dead_ends(self) -> list[StateT]:
        """States from which no terminal state can be reached: a sound table has none."""
        good = {following for row in self.rows.values() for following in row.values() if self.terminal(following)}
        grew = True
        while grew:
            more = {state for state, row in self.rows.items() if state not in good and good & set(row.values())}
            grew = bool(more)
            good |= more
        return [state for state in self.rows if state not in good]

    def diagram(self) -> str:
        """The table as a Mermaid state diagram; the state of the first row is the initial one."""
        lines = ["stateDiagram-v2", f"    [*] --> {_node(next(iter(self.rows)))}"]
        lines += [f'    state "{state}" as {_node(state)}' for state in self.rows if _node(state) != state]
        for state, row in self.rows.items():
            lines += [f"    {_node(state)} --> {_node(following)}: {event}" for event, following in row.items()]
        lines += [f"    {_node(state)} --> [*]" for state in self._terminals()]
        return "\n".join(lines)

    def _terminals(self) -> list[StateT]:
        seen = dict.fromkeys(following for row in self.rows.values() for following in row.values())
        return [state for state in seen if self.terminal(state)]


def _node(state: StrEnum) -> str:
    """The name of the state's node in a diagram: Mermaid takes no hyphen there."""
    return state.replace("-", "_")
