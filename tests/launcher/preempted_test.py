"""Ranks that end with code 75 by themselves: one rule for all jobs, see docs/guides/restarts.md."""

import pytest

from tests.launcher.launching import python
from tests.launcher.node_group_test import two_nodes

pytestmark = [pytest.mark.processes, pytest.mark.waits]

ALL, ONE = "sys.exit(75)", "sys.exit(75 * rank)"
FAILS = "sys.exit(75) if rank else (time.sleep(0.2), sys.exit(1))"
HANGS = "sys.exit(75) if rank else time.sleep(1000)"
LOSES = "sys.exit(75) if rank else (time.sleep(0.2), sys.exit(5))"
AGAIN = ("--max_preemptions=2", "--restart_backoff_seconds=0.1")
LATE = "rank 0 did not end within 1 s (--grace_seconds), although rank 1 ended with code 75 (preempted)"


@pytest.mark.parametrize("size", ["2", "2:2"])
@pytest.mark.parametrize(
    "body, flags, code, restarts, last",
    [
        (ALL, ("--max_restarts=2", "--max_preemptions=0"), 75, 0, "all ranks ended with code 75 (preempted)."),
        (ALL, ("--max_restarts=0", *AGAIN), 75, 2, "--max_preemptions=2 is used up."),
        (ONE, ("--max_restarts=2", "--max_preemptions=0"), 75, 0, "rank 1 ended with code 75 (preempted). Its log: "),
        (ONE, ("--max_restarts=0", *AGAIN), 75, 2, "--max_preemptions=2 is used up."),
        (LOSES, ("--max_restarts=0", *AGAIN), 75, 2, "--max_preemptions=2 is used up."),
        (FAILS, ("--max_restarts=0", *AGAIN), 1, 0, "rank 0 ended with code 1 (failed)."),
        (HANGS, ("--max_restarts=0", "--grace_seconds=1", *AGAIN), 5, 0, LATE),
    ],
)
def test_ranks_that_end_with_75_were_preempted_unless_another_one_fails(
    size, body, flags, code, restarts, last, launch
) -> None:
    one = launch(*python(body), flags=(f"--processes={size}", *flags))
    assert one.wait() == code
    assert one.err.count(": restart ") == restarts
    assert last in one.said[-1]


@pytest.mark.parametrize(
    "codes, code, last",
    [
        ((75, 75), 75, "all ranks ended with code 75 (preempted)."),
        ((75, 0), 75, "ranks of node 0 ended with code 75 (preempted)."),
        ((0, 75), 75, "ranks of node 1 ended with code 75 (preempted)."),
        ((1, 75), 1, "node 0 is lost: ended with code 1 (failed): rank 0 ended with code 1 (failed)."),
    ],
)
def test_on_several_hosts_all_launchers_return_the_same(codes, code, last, launch) -> None:
    nodes = two_nodes(launch, *python(f"time.sleep(0.5 * (rank == 0)); sys.exit({codes}[rank])"))
    assert [one.wait() for one in nodes] == [code, code]
    assert any(one.said[-1].endswith(f" {last}") for one in nodes)


def test_a_node_whose_ranks_hang_does_not_hold_the_others(launch) -> None:
    nodes = two_nodes(launch, *python(HANGS), flags=("--grace_seconds=1",))
    assert [one.wait() for one in nodes] == [5, 5]
    assert "node 0 did not reach 'launch/end' within 1 s of the end of this node's ranks" in nodes[1].said[-1]


@pytest.mark.parametrize("other, code, grace", [("sys.exit(0)", 75, 60), ("time.sleep(1000)", 143, 1)])
def test_a_launcher_that_is_asked_to_end_returns_75_only_if_no_rank_had_to_be_killed(
    other, code, grace, launch
) -> None:
    handlers = f"signal.signal(15, lambda *_: {other} if rank else sys.exit(75))"
    one = launch(
        *python(f"import signal; {handlers}; print('ready', flush=True); time.sleep(1000)"),
        flags=(f"--grace_seconds={grace}",),
    )
    assert sorted(one.read_line() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
    one.process.terminate()
    assert one.wait() == code
