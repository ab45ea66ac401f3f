import os

import pytest

from tfdist.cluster import affinity


@pytest.fixture
def host(monkeypatch, tmp_path):
    """A host with two sockets of two cores of two threads, numbered like Linux: the second threads come last."""
    bound: list[set[int]] = []
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{cpu % 4 // 2}\n")
        (folder / "core_id").write_text(f"{cpu % 2}\n")
    monkeypatch.setattr(affinity, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(affinity, "_CORES_BY_BINDING", {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: bound[-1] if bound else set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, share: bound.append(share))
    return bound


@pytest.mark.parametrize(
    ("rank", "processes", "cores", "expected"),
    [
        *((rank, 4, 2, [{rank, rank + 4}]) for rank in range(4)),  # both threads of a core go to one process
        (0, 2, 4, [{0, 4, 1, 5}]),  # which stays on one socket
        (2, 3, 2, [{6, 3, 7}]),
        (0, 9, 1, []),  # more processes than cores share them all
    ],
)
def test_a_process_is_bound_to_its_share_once(host, rank, processes, cores, expected):
    for _ in range(2):  # a second strategy of the process keeps its share
        assert affinity.bind_to_share(rank, processes) == cores
    assert host == expected


def test_a_choice_made_before_is_left_alone(host, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert affinity.bind_to_share(0, 2) == 1
    assert affinity.bind_to_share(0, 2, assigned=True) == 2
    assert not host


@pytest.mark.parametrize("intra_op_threads", [False, True])
def test_the_number_of_cores_is_the_same_before_and_after_they_are_divided(host, intra_op_threads):
    if not intra_op_threads:
        affinity.bind_to_share(2, 3)
    assert affinity.cores_per_process(3) == 2


@pytest.mark.parametrize(
    ("text", "cores"), [("250000 100000\n", 2.5), ("max 100000\n", float("inf")), (None, float("inf"))]
)
def test_a_container_may_limit_the_time_of_its_cores(monkeypatch, tmp_path, text, cores):
    monkeypatch.setattr(affinity, "QUOTA", tmp_path / "cpu.max")
    if text:
        affinity.QUOTA.write_text(text)
    assert affinity.cpu_quota() == cores


def test_where_the_system_forbids_binding_threads_are_shared_still(host, monkeypatch):
    def forbidden(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    assert affinity.bind_to_share(0, 2) == 4


def test_without_topology_cores_are_taken_by_number(host, monkeypatch, tmp_path):
    monkeypatch.setattr(affinity, "TOPOLOGY", tmp_path / "missing")
    affinity.bind_to_share(1, 2)
    assert host == [{4, 5, 6, 7}]
