"""A process that fails leaves its groups, although its threads do not end."""

import os

from tests.waiting import wait_for
from tfdist.coordination import client
from tfdist.coordination.group import LostMember


def test_members_leave_with_the_code_of_a_failure(job):
    three = job(3)
    client._members.clear()
    client.leave_on_failure(three.members[1]._client)
    client._leave_all(SystemExit(0))
    client._leave_all(SystemExit(75))  # on which all ranks agree
    assert three.members[1].goodbye_code is None
    client._leave_all(ValueError("wrong"))
    expected = LostMember(1, "ended with code 1 (failed): ValueError: wrong", 1)
    assert wait_for(three.members[0].first_loss) == expected
    client._leave_all(SystemExit(7))  # has left already
    assert three.members[1].goodbye_code == 1


def test_a_forked_process_does_not_leave_for_its_parent(job):
    """Its connection is that of the parent."""
    two = job(2)
    child = os.fork()
    if child == 0:
        os._exit(len(client._members))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert two.members[0]._client in client._members
