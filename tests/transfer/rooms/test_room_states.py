import pytest

from twinpool.contracts.errors import IllegalTransition
from twinpool.decode.request import PHASES as DECODE
from twinpool.prefill.request import PHASES as PREFILL
from twinpool.transfer.rooms.room_states import RECEIVER, SENDER, ReceiverEvent, ReceiverState, SenderEvent, SenderState


def test_c5_from_every_state_an_end_can_be_reached() -> None:
    assert [table.dead_ends() for table in (SENDER, RECEIVER)] == [[], []]
    assert [table.dead_ends() for table in (PREFILL, DECODE)] == [[], []]


def test_c8_ended_rooms_stay_ended() -> None:
    for event in SenderEvent:
        with pytest.raises(IllegalTransition, match="can't happen in state ended"):
            SENDER.next(SenderState.ENDED, event)
    for heard in ReceiverEvent:
        for state in (ReceiverState.ENDED, ReceiverState.COMPLETE):
            with pytest.raises(IllegalTransition):
                RECEIVER.next(state, heard)


def test_a5_an_aborted_room_ends_only_by_the_writers_word_or_death() -> None:
    assert set(RECEIVER.rows[ReceiverState.ABORTING]) == {
        ReceiverEvent.QUIESCED,
        ReceiverEvent.FAILED,
        ReceiverEvent.FINISHED,
        ReceiverEvent.LOST,
    }


def test_nothing_is_written_before_the_grant_or_after_the_slot() -> None:
    assert [s for s, row in SENDER.rows.items() if SenderEvent.WROTE in row] == [SenderState.GRANTED]
    assert [s for s, row in SENDER.rows.items() if SenderEvent.SENT in row] == [SenderState.GRANTED]


def test_every_ending_event_can_come_in_every_state_that_still_lives() -> None:
    for sending in SENDER.rows.values():
        assert {SenderEvent.FAILED, SenderEvent.ABORT, SenderEvent.LOST} <= set(sending)
    for receiving in RECEIVER.rows.values():
        assert {ReceiverEvent.FAILED, ReceiverEvent.LOST} <= set(receiving)


def test_the_diagram_names_every_row() -> None:
    diagram = RECEIVER.diagram()
    assert diagram.count("-->") == 1 + sum(map(len, RECEIVER.rows.values())) + 2
    assert "[*] --> open\n" in diagram
