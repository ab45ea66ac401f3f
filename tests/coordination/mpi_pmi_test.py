"""The commands that an MPI library sends at its start, and the replies to them."""

import os
import socket
import threading

import pytest

from tests.waiting import DEADLINE
from tfdist.coordination import LocalGroup
from tfdist.distribution.horovod_rendezvous import _Service, pmi_service, process_mapping

pytestmark = [pytest.mark.processes, pytest.mark.waits]


class Library:
    """An MPI library's side of the conversation."""

    def __init__(self, sock):
        self._sock, self._lines = sock, sock.makefile("r", encoding="latin-1")

    def ask(self, command):
        self._sock.sendall(f"{command}\n".encode())
        return self._lines.readline().rstrip("\n")

    def close(self):
        self._lines.close()
        self._sock.close()


@pytest.fixture
def libraries(job):
    started, threads = [], []

    def start(members, hosts):
        for member in members:
            own, theirs = socket.socketpair()
            service = _Service(member, hosts, DEADLINE)
            threads.append(threading.Thread(target=service.serve, args=(own,)))
            threads[-1].start()
            theirs.settimeout(DEADLINE)
            started.append(Library(theirs))
        return started

    yield start
    for library in started:
        library.close()
    for thread in threads:
        thread.join(DEADLINE)


def test_a_library_learns_who_it_is(job, libraries):
    first, second = libraries(job(2).members.values(), ["a", "b"])
    for library in (first, second):
        assert library.ask("cmd=init pmi_version=1 pmi_subversion=1") == (
            "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1"
        )
        assert library.ask("cmd=get_maxes") == "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024"
        assert library.ask("cmd=get_universe_size") == "cmd=universe_size rc=0 size=2"
        assert library.ask("cmd=get_appnum") == "cmd=appnum rc=0 appnum=0"
        name = library.ask("cmd=get_my_kvsname").partition("kvsname=")[2]
        mapping = library.ask(f"cmd=get kvsname={name} key=PMI_process_mapping")
        assert mapping == "cmd=get_result rc=0 msg=success value=(vector,(0,1,1),(1,1,1))"
        assert library.ask("cmd=finalize") == "cmd=finalize_ack rc=0"


def test_what_one_has_put_all_others_get_after_a_barrier(job, libraries):
    started = libraries(job(3).members.values(), ["a"] * 3)
    for use in range(2):  # a key can be used again
        for rank, library in enumerate(started):
            assert library.ask(f"cmd=put kvsname=kvs_0 key=at-{rank} value=[{rank}]#{use}=") == (
                "cmd=put_result rc=0 msg=success"
            )
        waiting = [threading.Thread(target=library.ask, args=("cmd=barrier_in",)) for library in started[1:]]
        for thread in waiting:
            thread.start()
        assert started[0].ask("cmd=barrier_in") == "cmd=barrier_out rc=0 msg=success"
        for thread in waiting:
            thread.join()
        for library in started:
            found = [library.ask(f"cmd=get kvsname=kvs_0 key=at-{rank}") for rank in range(3)]
            assert found == [f"cmd=get_result rc=0 msg=success value=[{rank}]#{use}=" for rank in range(3)]


def test_a_key_that_nobody_has_put_is_not_found(job, libraries):
    [library] = libraries(job(1).members.values(), ["a"])
    assert library.ask("cmd=get kvsname=kvs_0 key=x") == "cmd=get_result rc=-1 msg=key_not_found value=unknown"
    assert library.ask("cmd=spawn nprocs=1") == "cmd=spawn rc=-1 msg=unsupported"


def test_a_lost_member_fails_the_barrier_of_the_others(job, libraries, caplog):
    two = job(2)
    first, _ = libraries(two.members.values(), ["a"] * 2)
    two.members[1].leave(1, "it ended")
    assert first.ask("cmd=barrier_in") == "cmd=barrier_out rc=-1 msg=failed"
    assert "MPI cannot start: " in caplog.text and "rank 1" in caplog.text


@pytest.mark.parametrize(
    ("hosts", "blocks"),
    [
        (["a"], "(0,1,1)"),
        (["a"] * 4, "(0,1,4)"),
        (["a", "a", "b"], "(0,1,2),(1,1,1)"),
        (["a", "b", "c"], "(0,1,1),(1,1,1),(2,1,1)"),
        (["a", "b", "a"], "(0,1,1),(1,1,1),(0,1,1)"),
    ],
)
def test_the_mapping_names_the_ranks_of_each_host(hosts, blocks):
    assert process_mapping(hosts) == f"(vector,{blocks})"


def test_processes_that_a_rank_starts_are_not_in_the_mpi_job():
    with pmi_service(LocalGroup(), ["a"], 5.0):
        library = Library(socket.socket(fileno=int(os.environ["PMI_FD"])))
        assert (os.environ["PMI_RANK"], os.environ["PMI_SIZE"]) == ("0", "1")
    assert not {name for name in os.environ if name.startswith("PMI_")}
    assert library.ask("cmd=get_universe_size") == "cmd=universe_size rc=0 size=1"
    library.close()
