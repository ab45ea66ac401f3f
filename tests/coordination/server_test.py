import threading
import time

import pytest

from tests.coordination.members import outcome
from tests.coordination.suspension import Suspension
from tests.coordination.wire import HELLO, Wire, drip
from tests.waiting import DEADLINE, wait_for
from tfdist.coordination import LostMember
from tfdist.coordination.messages import LIMIT, OVERHEAD
from tfdist.coordination.server import Connection
from tfdist.errors import InputError

pytestmark = [pytest.mark.processes, pytest.mark.waits]


def test_everyone_gets_everyones_values_in_the_order_of_ranks(job):
    three = job(3)
    for use in range(3):  # a name can be reused
        assert three.all(lambda m, use=use: m.gather("x", [m.rank, use])) == [[[0, use], [1, use], [2, use]]] * 3
    assert three.all(lambda m: m.broadcast("y", f"from {m.rank}", root=2)) == ["from 2"] * 3
    three.all(lambda m: m.barrier("z"))


def test_many_names_are_open_at_once_from_many_threads(job):
    two = job(2)
    names = [f"name {i}" for i in range(8)]
    calls = [two.start(two.members[0].gather, name, name) for name in names]
    calls += [two.start(two.members[1].gather, name, name) for name in reversed(names)]
    assert [call.result(DEADLINE) for call in calls] == [[name] * 2 for name in [*names, *reversed(names)]]


def test_a_name_is_used_once_at_a_time(job):
    two = job(2)
    first = two.start(two.members[0].gather, "x", 1)
    wait_for(lambda: two.members[0]._client._pending)
    with pytest.raises(ValueError, match="used by one operation at a time"):
        two.members[0].gather("x", 2)
    assert two.members[1].gather("x", 3) == [1, 3] == first.result(DEADLINE)


def test_a_member_that_leaves_with_code_0_is_not_lost(job):
    two = job(2)
    pending = two.start(outcome, two.members[0].gather, "end", 0)
    wait_for(lambda: two.members[0]._client._pending)
    two.members[1].leave()
    assert pending.result(DEADLINE) == "'end' cannot complete: rank 1 has left with code 0."
    assert outcome(two.members[0].gather, "later", 0) == "'later' cannot complete: rank 1 has left with code 0."
    assert two.members[0].first_loss() is None and two.server.loss is None


def test_a_member_that_leaves_with_another_code_is_told_to_the_others_once(job):
    three = job(3)
    heard, callers = [], []

    def callback(loss):
        heard.append(loss)
        callers.append(threading.current_thread())

    three.members[0].on_loss(callback)
    pending = three.start(outcome, three.members[2].gather, "x", 0)
    wait_for(lambda: three.members[2]._client._pending)
    three.members[1].leave(3, "step 7: the loss is inf")
    loss = LostMember(1, "ended with code 3 (loss not finite): step 7: the loss is inf", 3)
    assert wait_for(three.members[0].first_loss) == wait_for(three.members[2].first_loss) == loss
    assert pending.result(DEADLINE) == f"'x' cannot complete: {loss}."
    assert f"{loss}" in outcome(three.members[0].gather, "later", 0)
    three.members[2].leave(5)  # a consequence
    wait_for(lambda: heard)
    late: list[LostMember] = []
    three.members[0].on_loss(late.append)  # registered after the loss, but still called
    wait_for(lambda: late)
    time.sleep(0.05)
    assert heard == late == [loss] and callers[0] is not threading.main_thread()
    assert three.server.loss == loss


def test_operations_complete_without_members_whose_losses_are_tolerated(job):
    four = job(4)
    departures = []
    four.members[0].on_departure(departures.append)
    four.members[0].tolerate_lost_members([1, 2])
    wait_for(lambda: four.server.tolerated_members == {1, 2})
    waiting = [four.start(four.members[rank].gather, "x", rank) for rank in (0, 3)]
    arrived = four.start(outcome, four.members[2].gather, "x", 2)
    wait_for(lambda: four.members[2]._client._pending)
    four.members[1]._client._disconnect()
    assert [call.result(DEADLINE) for call in waiting] == [[0, None, 2, 3]] * 2 and arrived.result(DEADLINE)
    four.members[2]._client._disconnect()
    wait_for(lambda: len(departures) == 2)
    assert [loss.rank for loss in departures] == [1, 2] and four.members[3].departed_members == {1, 2}
    ours = [four.members[rank].subgroup([0, 1, 3]) for rank in (0, 3)]
    assert [group.departed_members for group in ours] == [{1}, {1}]  # members of the subgroup
    calls = [four.start(group.all_equal, "y", "same") for group in ours]
    assert [call.result(DEADLINE) for call in calls] == [True] * 2
    assert (
        not four.server._operations._operations and four.server.loss is None and four.server.departed_members == {1, 2}
    )
    assert wait_for(four.members[1].first_loss)  # it cannot go on itself
    assert four.members[0].first_loss() is None
    four.members[3]._client._disconnect()
    assert wait_for(four.members[0].first_loss).rank == 3


def test_the_servers_death_is_a_loss_and_its_farewell_is_none(job):
    two = job(2)
    pending = two.start(outcome, two.members[1].gather, "x", 0)
    wait_for(lambda: two.members[1]._client._pending)
    two.server.close("rank 0 has left with code 0")
    assert pending.result(DEADLINE) == "'x' cannot complete: rank 0 has left with code 0."
    assert two.members[1].first_loss(wait=0.2) is None
    assert outcome(two.members[1].gather, "y", 0) == "'y' cannot complete: rank 0 has left with code 0."


def test_a_wrong_token_is_refused_and_logged(job, caplog):
    two = job(2)
    with pytest.raises(InputError, match="The token must match the group's"):
        two.join(1, token="another")
    assert "The token must match" in caplog.text
    assert two.members[0].first_loss() is None


def test_what_is_no_message_is_an_error_of_the_one_who_sends_it(job):
    two = job(2)
    with pytest.raises(TypeError):
        two.members[0].gather("x", object())
    with pytest.raises(InputError, match=rf"at most {LIMIT} bytes. Received: [0-9]+ for 'big'"):
        two.members[0].gather("big", "x" * LIMIT)
    large = "x" * (LIMIT - 1000)
    assert two.all(lambda m: m.gather("x", large)) == [[large] * 2] * 2


def test_a_member_that_breaks_the_protocol_is_lost(job):
    two = job(2)
    two.members[1]._client._send(b"x" * (LIMIT + 1))
    loss = wait_for(two.members[0].first_loss)
    assert loss and loss.rank == 1 and f"more than {LIMIT + OVERHEAD} bytes" in loss.reason


def test_a_server_that_was_stopped_itself_does_not_blame_the_members(job, monkeypatch):
    suspension = Suspension(monkeypatch, "tfdist.coordination.server")
    one = job(1, members=False, heartbeat=0.1, lost_after=10.0)
    with Wire(one.server.address, {**HELLO, "size": 1}) as wire:
        assert wire.receive()["type"] == "welcome"
        suspension.suspend(1000.0)
        assert one.server.loss is None
        suspension.pace = 0.5
        assert "no heartbeat for 10 s" in wait_for(lambda: one.server.loss).reason  # silence is still detected


def test_the_process_that_may_serve_is_answered_last(job, monkeypatch):
    """After its answer, it may not run any thread until the others have their answers, too."""
    order = []
    original = Connection.send

    def send(self, message):
        if message["type"] == "values":
            order.append(self.rank)
        original(self, message)

    monkeypatch.setattr(Connection, "send", send)
    three = job(3)
    for come in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        order.clear()
        calls = []
        for rank in come:
            calls.append(three.start(three.members[rank].gather, "x", rank))
            wait_for(lambda rank=rank: three.members[rank]._client._pending or len(order) == 3)
        assert [call.result(DEADLINE) for call in calls] == [[0, 1, 2]] * 3
        assert order == [2, 1, 0]


def test_a_doubt_makes_a_silent_member_lost_sooner(job):
    """A member's engine has failed because another member is stopped, which must be identified at once."""
    two = job(2, members=False, lost_after=60.0)
    with Wire(two.server.address, {**HELLO, "rank": 1}):
        member = two.join(0)
        time.sleep(0.5)
        assert member.first_loss() is None
        loss = member.first_loss(wait=DEADLINE)
        assert loss and loss.rank == 1 and "no heartbeat for 3 s" in loss.reason


def test_bytes_that_make_no_message_do_not_hide_a_lost_member(job):
    """As those of someone on the way, who cannot seal a message."""
    two = job(2, members=False, heartbeat=0.1, lost_after=3.0)
    member = two.join(0)
    with Wire(two.server.address, {**HELLO, "rank": 1}) as wire:
        drip(wire.sock, until=member.first_loss)
    loss = member.first_loss()
    assert loss and loss.rank == 1 and "no heartbeat for 3 s" in loss.reason
