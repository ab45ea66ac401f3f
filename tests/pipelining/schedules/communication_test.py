"""Messages between processes: each is sent once and received once, and there are none within a process."""

from hypothesis import given

from tests.pipelining.schedules.arbitrary_schedules import any_schedules, named_schedules
from tfdist.pipelining.schedule import Action
from tfdist.pipelining.schedule_catalog import make_schedule


@given(named_schedules() | any_schedules())
def test_each_message_is_sent_and_received_once(schedule):
    rows = [[schedule.messages_of(action) for action in row] for row in schedule.actions]
    sent = sorted(pair.send for row in rows for pair in row if pair.send)
    assert sent == sorted(pair.receive for row in rows for pair in row if pair.receive)
    assert len({(m.source, m.target, m.tag) for m in sent}) == len(sent), "tags are unique"
    for process, row in enumerate(rows):
        assert all(pair.send is None or pair.send.source == process for pair in row)
        assert all(pair.receive is None or pair.receive.target == process for pair in row)


def test_neighbors_in_the_same_process_need_no_message():
    interleaved = make_schedule("interleaved(chunks=2)", processes=2, micro_batches=2)
    assert interleaved.messages_of(Action("F", 0, 0)).receive is None
    assert interleaved.messages_of(Action("B", 3, 0)).receive is None
    sent = interleaved.messages_of(Action("F", 1, 0)).send
    assert sent == ("F", 1, 0, 1, 0), "from the last process to the first"
    alone = make_schedule("interleaved(chunks=2)", processes=1, micro_batches=2)
    assert {message for row in alone.actions for action in row for message in alone.messages_of(action)} == {None}
    parts = make_schedule("zb_h1", processes=2, micro_batches=1)
    assert parts.messages_of(Action("W", 1, 0)) == (None, None)
    assert parts.messages_of(Action("I", 1, 0)).send.tag == "1B0"
