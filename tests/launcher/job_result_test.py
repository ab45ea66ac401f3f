import dataclasses

import pytest

from tfdist.coordination import LostMember
from tfdist.coordination.group import NO_GOODBYE, silence_reason
from tfdist.launcher.job import SUCCESS, Outcome, root_cause


@dataclasses.dataclass
class EndedProcess:
    rank: int
    code: int | None
    end_time: float = 0.0
    signaled: bool = False


@pytest.mark.parametrize(
    "ends, cause",
    [
        ([], None),
        ([EndedProcess(0, 0), EndedProcess(1, None)], None),
        ([EndedProcess(0, 3)], 0),
        ([EndedProcess(0, 1, 2.0), EndedProcess(1, 137, 1.0)], 1),  # the first failure
        ([EndedProcess(0, 5, 1.0), EndedProcess(1, 3, 2.0)], 1),  # losing a peer is a consequence
        ([EndedProcess(0, 5, 2.0), EndedProcess(1, 5, 1.0)], 1),  # unless all processes lost a peer
        ([EndedProcess(0, 143, 1.0, signaled=True), EndedProcess(1, 3, 2.0)], 1),  # so is being ended by the launcher
        ([EndedProcess(0, 143, 1.0, signaled=True)], None),
        ([EndedProcess(0, 75, 1.0), EndedProcess(1, 1, 2.0)], 1),  # a preemption is not the cause either
        ([EndedProcess(0, 5, 1.0), EndedProcess(1, 75, 2.0)], 1),  # unless the others only lost that peer
    ],
)
def test_the_cause_is_the_first_that_is_no_consequence(ends, cause):
    found = root_cause(ends)
    assert found.rank == cause
    assert found == SUCCESS if cause is None else found.code == ends[cause].code


def test_what_a_member_said_as_it_left_is_the_cause_before_its_process_ends():
    loss = LostMember(1, "ended with code 3 (loss not finite): step 7", 3)
    found = root_cause([EndedProcess(0, 1, 1.0), EndedProcess(1, None)], loss)
    assert (found.rank, found.code) == (1, 3)
    assert found.reason == "rank 1 ended with code 3 (loss not finite): step 7"


def test_a_lost_peer_is_the_cause_only_if_nothing_else_has_failed():
    """Its process may not end."""
    loss = LostMember(1, "ended with code 5 (a peer was lost): too late.", 5)
    running = [EndedProcess(0, None), EndedProcess(1, None)]
    assert root_cause(running, loss) == Outcome(5, "rank 1 ended with code 5 (a peer was lost): too late", 1)
    assert root_cause([EndedProcess(0, 3), EndedProcess(1, None)], loss).rank == 0


def test_in_words():
    assert root_cause([EndedProcess(2, 137)]).reason == "rank 2 ended with code 137 (killed by SIGKILL)"


SILENT = LostMember(1, silence_reason(20.0))
CLOSED = [LostMember(rank, "its connection closed") for rank in range(3)]
SIGNAL_OFFSET = LostMember(
    1, "ended with code 143 (signal 15)", 143
)  # its own handler of SIGTERM calls `sys.exit(143)`


@pytest.mark.parametrize(
    "ends, loss",
    [
        ([EndedProcess(0, 5), EndedProcess(1, None), EndedProcess(2, 5)], SILENT),
        ([EndedProcess(0, 1), EndedProcess(1, None)], SILENT),  # error of its engine
        ([EndedProcess(0, None), EndedProcess(1, None)], SILENT),  # the others may hang, too
        ([EndedProcess(0, 5), EndedProcess(1, None)], LostMember(1, NO_GOODBYE)),
        ([EndedProcess(0, 5)], LostMember(1, NO_GOODBYE)),  # of another node
        ([EndedProcess(0, None)], SILENT),
    ],
)
def test_who_is_silent_and_still_runs_is_the_cause(ends, loss):
    assert root_cause(ends, loss) == Outcome(5, str(loss), 1)


@pytest.mark.parametrize(
    "ends, loss, cause",
    [
        ([EndedProcess(0, 5, 1.0), EndedProcess(1, 137, 2.0)], SILENT, 1),  # its own exit code is more specific
        ([EndedProcess(0, 5, 1.0), EndedProcess(1, 137, 2.0, signaled=True)], SILENT, 0),  # caused by the launcher
        ([EndedProcess(0, 1)], SILENT, 0),  # a failure here need not be caused by another node
        ([EndedProcess(0, None), EndedProcess(1, None)], LostMember(1, NO_GOODBYE), None),  # it may end successfully
        ([EndedProcess(0, None)], LostMember(1, NO_GOODBYE), None),
        ([EndedProcess(0, 1, 1.0), EndedProcess(1, 137, 1.01)], CLOSED[1], 1),  # the group knows better who was first
        ([EndedProcess(0, 1, 1.0), EndedProcess(1, 137, 1.01)], CLOSED[2], 0),  # of another node, or still running
        ([EndedProcess(0, 0), EndedProcess(1, None)], CLOSED[0], None),  # a silent end with code 0 is no failure
        ([EndedProcess(0, 0), EndedProcess(1, 5)], CLOSED[0], 1),
        ([EndedProcess(0, 3), EndedProcess(1, 143, 0.5, signaled=True)], SIGNAL_OFFSET, 0),  # by the launcher
        ([EndedProcess(0, None), EndedProcess(1, 143, 0.5, signaled=True)], SIGNAL_OFFSET, None),
    ],
)
def test_whoever_has_ended_or_is_not_missed_is_not(ends, loss, cause):
    found = root_cause(ends, loss)
    assert found.rank == cause and (found == SUCCESS) == (cause is None)
