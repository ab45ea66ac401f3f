"""Messages between processes: each is sent once and received once, and there are none within a process."""

from hypothesis import given

from tests.pipelining.schedules.arbitrary_schedules import any_schedules, named_schedules
from tfdist.pipelining.schedule import Action
from tfdist.pipelining.schedule_catalog import make_schedule


@given(named_schedules() | any_schedules())
def test_each_message_is_sent_and_received_once(schedule):
    actions = [(process, action) for process, row in enumerate(schedule.actions) for action in row]
    sent = [(process, *m) for process, action in actions if (m := schedule.message(action, is_sent=True))]
    received = [(m[0], process, m[1]) for process, action in actions if (m := schedule.message(action, is_sent=False))]
    assert sorted(sent) == sorted(received), "source, target and tag"
    assert len({*sent}) == len(sent), "tags are unique"


def test_the_first_and_the_last_stage_have_one_neighbor():
    interleaved = make_schedule("interleaved(chunks=2)", processes=2, micro_batches=2)
    assert interleaved.message(Action("F", 0, 0), is_sent=False) is None
    assert interleaved.message(Action("B", 3, 0), is_sent=False) is None
    assert interleaved.message(Action("F", 1, 0), is_sent=True) == (0, "1F0"), "from the last process to the first"
    parts = make_schedule("zb_h1", processes=2, micro_batches=1)
    assert {parts.message(Action("W", 1, 0), is_sent=sends) for sends in (True, False)} == {None}
    assert parts.message(Action("I", 1, 0), is_sent=True) == (0, "1B0")
