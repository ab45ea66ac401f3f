"""The order of messages: complete, and without a deadlock at any speed if sends wait for their receive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipelining.schedules.arbitrary_schedules import any_schedules, durations, named_schedules
from tfdist.errors import InputError
from tfdist.pipelining.schedule import Action
from tfdist.pipelining.schedule_catalog import make_schedule
from tfdist.pipelining.schedule_simulation import Exchange, exchanges, run_with_rendezvous, simulate


@given(named_schedules() | any_schedules(), st.data())
def test_no_deadlock_at_any_speed(schedule, data):
    seconds = {kind: data.draw(durations(schedule.stages)) for kind in "FBIW"}
    travelling = data.draw(durations(schedule.stages))
    spans = run_with_rendezvous(
        exchanges(schedule),
        lambda action: seconds[action.kind][action.stage],
        lambda message: travelling[message.stage],
    )
    assert tuple(tuple(span.action for span in row) for row in spans) == schedule.actions


@given(named_schedules() | any_schedules())
def test_each_message_is_sent_after_and_received_before_its_actions(schedule):
    messages = schedule.messages()
    wanted = sorted(pair.send for pair in messages.values() if pair.send)
    assert wanted == sorted(pair.receive for pair in messages.values() if pair.receive)
    assert len({(m.source, m.target, m.tag) for m in wanted}) == len(wanted), "tags are unique"
    found = []
    for process, program in enumerate(exchanges(schedule)):
        assert tuple(step for step in program if isinstance(step, Action)) == schedule.actions[process]
        place = {step: i for i, step in enumerate(program) if isinstance(step, Action)}
        place |= {
            message: i for i, step in enumerate(program) if isinstance(step, Exchange) for message in step.messages
        }
        found += [message for message in place if not isinstance(message, Action)]
        for action in schedule.actions[process]:
            receive, send = messages[action]
            assert receive is None or (receive.target == process and place[receive] < place[action])
            assert send is None or (send.source == process and place[send] > place[action])
    assert sorted(found) == sorted([*wanted, *wanted]), "once on each side"


@given(st.sampled_from(["gpipe", "1f1b", "zb_h1"]), st.integers(1, 6), st.integers(1, 15))
def test_sends_that_wait_cost_nothing_with_equal_stages_and_free_messages(spec, processes, micro_batches):
    schedule = make_schedule(spec, processes, micro_batches)
    eager, waiting = (
        simulate(schedule, forward=1, backward=2, sends=sends).makespan for sends in ("eager", "rendezvous")
    )
    assert eager == waiting


@given(named_schedules() | any_schedules(), st.data())
def test_sends_that_wait_make_nothing_earlier(schedule, data):
    seconds = {name: data.draw(durations(schedule.stages)) for name in ("forward", "backward")}
    eager, waiting = (simulate(schedule, **seconds, message=1, sends=s).spans for s in ("eager", "rendezvous"))
    for early, late in zip(sum(eager, ()), sum(waiting, ()), strict=True):
        assert early.action == late.action and early.start <= late.start + 1e-9


def test_activations_and_gradients_that_cross_are_fused():
    program = exchanges(make_schedule("1f1b", processes=2, micro_batches=3))[0]
    said = [
        str(step) if isinstance(step, Action) else "+".join(sorted(message.tag for message in step.messages))
        for step in program
    ]
    assert " ".join(said) == "0F0 0F0 0F1 0F1+1B0 0B0 0F2 0F2+1B1 0B1 1B2 0B2"


def separate_messages(schedule):
    """Returns the steps of each process if every message is an exchange of its own, just before or after its action."""
    programs = []
    for row in schedule.actions:
        steps = []
        for action in row:
            receive, send = schedule.messages_of(action)
            steps += [Exchange((receive,))] if receive else []
            steps += [action]
            steps += [Exchange((send,))] if send else []
        programs.append(tuple(steps))
    return tuple(programs)


def test_1f1b_deadlocks_with_messages_one_by_one():
    programs = separate_messages(make_schedule("1f1b", processes=2, micro_batches=2))
    with pytest.raises(InputError) as error:
        run_with_rendezvous(programs, lambda action: 1.0, lambda message: 0.0)
    assert str(error.value) == (
        "Processes of a pipeline must not wait for each other in a cycle. Received: process 0 waits to send 0F1 to process 1, "
        "process 1 waits to send 1B0 to process 0. Each action must come after those whose results it needs."
    )


def test_gpipe_does_not():
    schedule = make_schedule("gpipe", processes=3, micro_batches=4)
    spans = run_with_rendezvous(separate_messages(schedule), lambda action: 1.0, lambda message: 0.0)
    assert [len(row) for row in spans] == [8, 8, 8]


def test_neighbors_in_the_same_process_need_no_message():
    messages = make_schedule("interleaved(chunks=2)", processes=2, micro_batches=2).messages()
    assert messages[Action("F", 0, 0)].receive is None and messages[Action("B", 3, 0)].receive is None
    assert messages[Action("F", 1, 0)].send[:6] == ("F", 1, 2, 0, 1, 0), "from the last process to the first"
    alone = make_schedule("interleaved(chunks=2)", processes=1, micro_batches=2).messages()
    assert {message for pair in alone.values() for message in pair} == {None}
    weights = make_schedule("zb_h1", processes=2, micro_batches=1).messages()
    assert weights[Action("W", 1, 0)] == (None, None)
    assert weights[Action("I", 1, 0)].send.tag == "1B0"
