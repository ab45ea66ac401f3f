import threading
import time

import pytest

from tests.waiting import DEADLINE, wait_for
from tfdist.coordination import LocalGroup
from tfdist.coordination.messages import LIMIT
from tfdist.errors import InputError

pytestmark = [pytest.mark.processes, pytest.mark.waits]


def test_everyone_hears_everything_in_one_order(job):
    three = job(3)
    heard = {rank: [] for rank in three.members}
    for rank, member in three.members.items():
        member.subscribe("x", heard[rank].append)

    def publish(member):
        for number in range(50):
            member.publish("x", [member.rank, number])

    three.all(publish)
    wait_for(lambda: all(len(values) == 150 for values in heard.values()))
    assert heard[0] == heard[1] == heard[2]
    assert sorted(heard[0]) == [[rank, number] for rank in range(3) for number in range(50)]


@pytest.fixture(params=["local", "tcp"])
def groups(request, job):
    return [LocalGroup()] * 2 if request.param == "local" else list(job(2).members.values())


def test_what_was_told_before_is_heard_at_registration(groups):
    teller, listener = groups
    heard = []
    for number in range(3):
        teller.publish("x", (number, "a"))
    teller.publish("y", "another topic")
    time.sleep(0.05)
    listener.subscribe("x", lambda value: heard.append((value, threading.current_thread())))
    teller.publish("x", None)
    wait_for(lambda: len(heard) == 4)
    assert [value for value, _ in heard] == [[0, "a"], [1, "a"], [2, "a"], None]
    assert threading.current_thread() not in {thread for _, thread in heard}
    listener.leave()


def test_a_listener_that_is_done_is_followed_by_the_next(groups):
    teller, listener = groups
    first, second = [], []
    listener.subscribe("x", lambda value: first.append(value) or value == 2)
    listener.subscribe("x", second.append)
    for number in range(5):
        teller.publish("x", number)
    wait_for(lambda: len(second) == 2)
    assert (first, second) == ([0, 1, 2], [3, 4])
    listener.leave()


def test_an_error_of_a_listener_is_logged_and_the_next_value_is_heard(job, caplog):
    member = job(1).members[0]
    heard = []

    def listener(value):
        heard.append(value)
        if value == 0:
            raise RuntimeError("no good")

    member.subscribe("x", listener)
    member.publish("x", 0)
    member.publish("x", 1)
    wait_for(lambda: heard == [0, 1])
    assert "no good" in caplog.text and "'x'" in caplog.text


def test_telling_does_not_disturb_who_waits_and_does_not_wait(job):
    two = job(2)
    pending = two.start(two.members[0].gather, "name", 0)
    two.members[0].publish("name", 1)
    assert not pending.done()
    two.members[1].gather("name", 1)
    assert pending.result(DEADLINE) == [0, 1]


def test_a_value_above_the_limit_is_bad_input(job):
    member = job(1).members[0]
    with pytest.raises(InputError, match="Received: .* for 'x'"):
        member.publish("x", "y" * LIMIT)
    with pytest.raises(TypeError):
        LocalGroup().publish("x", object())


def test_after_the_end_nobody_hears(job):
    two = job(2)
    heard = []
    two.members[1].subscribe("x", heard.append)
    two.members[0].leave()
    two.members[0].publish("x", 1)
    two.members[1].leave()
    two.members[1].publish("x", 2)
    time.sleep(0.05)
    assert heard == []
