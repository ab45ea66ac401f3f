"""The start of Horovod: its library, and addresses of several hosts; `conformance` has real processes on one host."""

import dataclasses
import os
import socket

import pytest

pytest.importorskip("horovod")

import tensorflow as tf

from tfdist.cluster.environment import Cluster
from tfdist.coordination import LocalGroup
from tfdist.coordination.job_token import Route
from tfdist.distribution import horovod_rendezvous
from tfdist.distribution.horovod_rendezvous import LibraryChoice, choose_library, rank_choice
from tfdist.errors import InputError


class Others:
    """The group of one rank, with given values of the others."""

    def __init__(self, ways):
        self.ways, self.size = ways, 2

    def gather(self, name, value):
        assert name == "horovod/ways" and value in self.ways
        return self.ways

    def agree(self, name, value, what):
        assert name == "horovod/communication" and what == "--"

    def broadcast(self, name, value):
        return 7 if value is None else value


def described(monkeypatch, rank, ways, local_rank, local_size):
    monkeypatch.setattr(horovod_rendezvous, "route_to", lambda host, port, family: Route(*ways[rank]))
    monkeypatch.setattr(horovod_rendezvous, "network_interface", lambda address: f"with {address}")
    monkeypatch.delenv("HOROVOD_GLOO_IFACE", raising=False)
    cluster = Cluster(rank, len(ways), local_rank, local_size, coordinator="node0:1")
    return horovod_rendezvous.serve_and_describe(cluster, Others(ways))


@pytest.mark.parametrize(
    "here",
    [["127.0.0.1", "127.0.1.1"], ["10.0.0.1", "10.0.0.1"]],
    ids=["its name is its loopback", "its name is its address"],
)
def test_hosts_are_told_apart_by_addresses_which_others_can_reach(monkeypatch, here):
    ways = [here, here, ["10.0.0.2", "10.0.0.1"]]
    second = described(monkeypatch, 1, ways, 1, 2)
    third = described(monkeypatch, 2, ways, 0, 1)
    for one in (second, third):
        assert one["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.0.0.1"
    assert (second["HOROVOD_HOSTNAME"], second["HOROVOD_GLOO_IFACE"]) == ("10.0.0.1", "with 10.0.0.1")
    assert (third["HOROVOD_HOSTNAME"], third["HOROVOD_GLOO_IFACE"]) == ("10.0.0.2", "with 10.0.0.2")
    assert (third["HOROVOD_LOCAL_RANK"], third["HOROVOD_CROSS_RANK"]) == ("0", "1")


def test_one_host_stays_on_the_loopback(monkeypatch):
    ways = [["10.0.0.1", "10.0.0.1"]] * 2
    one = described(monkeypatch, 1, ways, 1, 2)
    assert (one["HOROVOD_GLOO_RENDEZVOUS_ADDR"], one["HOROVOD_HOSTNAME"]) == ("127.0.0.1", "127.0.0.1")


def test_an_interface_that_the_user_names_is_taken(monkeypatch):
    monkeypatch.setattr(horovod_rendezvous, "route_to", lambda host, port, family: Route("10.0.0.2", "10.0.0.1"))
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "ib0")
    ways = [["10.0.0.1", "10.0.0.1"], ["10.0.0.2", "10.0.0.1"]]
    one = horovod_rendezvous.serve_and_describe(Cluster(1, 2, 0, 1, coordinator="node0:1"), Others(ways))
    assert one["HOROVOD_GLOO_IFACE"] == "ib0"


def test_a_second_start_under_a_launcher_knows_where_rank_0_is(monkeypatch):
    """No coordinator is given then: the address is in Horovod's variables."""
    asked = []
    monkeypatch.setattr(
        horovod_rendezvous, "route_to", lambda *given: asked.append(given) or Route("10.0.0.2", "10.0.0.1")
    )
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "10.0.0.1")
    ways = [["10.0.0.1", "10.0.0.1"], ["10.0.0.2", "10.0.0.1"]]
    one = horovod_rendezvous.serve_and_describe(Cluster(1, 2, 0, 1), Others(ways))
    assert asked == [("10.0.0.1", 1, socket.AF_INET)]
    assert one["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.0.0.1"


def test_a_host_without_an_ipv4_address_is_refused(monkeypatch):
    with pytest.raises(InputError, match=r"needs an IPv4 address of rank 0's host. Received: \[::1\]:7 \("):
        horovod_rendezvous.serve_and_describe(Cluster(1, 2, 0, 1, coordinator="[::1]:7"), Others([]))


LIBRARIES = ("HOROVOD_CPU_OPERATIONS", "HOROVOD_CONTROLLER")


class Started:
    """What `start_horovod` does, in order."""

    def __init__(self, monkeypatch, variables):
        self.steps, self.automatic = [], LibraryChoice("gloo", "because")
        for name in ("HOROVOD_RANK", *LIBRARIES, "TFDIST_GROUP", "TFDIST_COORDINATOR", "TFDIST_COMMUNICATION"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        for name in (*LIBRARIES, "HOROVOD_FUSION_THRESHOLD"):
            monkeypatch.setenv(name, variables.get(name, ""))  # which are set by the call, and restored after the test
        for name in LIBRARIES:
            if name not in variables:
                monkeypatch.delenv(name)
        monkeypatch.setattr(horovod_rendezvous, "_library_in_use", {})
        monkeypatch.setattr(horovod_rendezvous, "choose_library", lambda *_: self.automatic)
        monkeypatch.setattr(horovod_rendezvous, "_init", self.init)
        monkeypatch.setattr(horovod_rendezvous, "initialize_mpi", lambda *_: self.steps.append("MPI"))
        monkeypatch.setattr(horovod_rendezvous, "serve_and_describe", lambda *_: self.steps.append("rendezvous") or {})
        monkeypatch.setattr(horovod_rendezvous, "_broadcast_coordinator", lambda cluster: cluster)
        monkeypatch.setattr(horovod_rendezvous, "_check_size", lambda *_: None)

    def join(self, cluster):
        self.steps.append("group")
        return Others([])

    def init(self, options, *_):
        self.steps.append("Horovod")
        self.options = options
        self.libraries = tuple(os.environ.get(name) for name in ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"))


BY_TF_CONFIG = Cluster(1, 2, 1, 2, coordinator="127.0.0.1:1", source="TF_CONFIG")
BY_LAUNCH = Cluster(1, 2, 1, 2, coordinator="127.0.0.1:1", source="Horovod")
BY_HOROVODRUN = Cluster(1, 2, 1, 2, source="Horovod")
BY_MPIRUN = Cluster(1, 2, 1, 2, source="MPI")
PLACED = {"HOROVOD_RANK": "1", "HOROVOD_CPU_OPERATIONS": "gloo"}


FASTER, SAID, GIVEN = "because it is faster", "as --communication says", "as TFDIST_COMMUNICATION says"
BY_PROGRAM, BY_RUN = "because the program does not choose a library", "because horovodrun started the processes"
GLOO, MPI_STEPS = ["group", "rendezvous", "Horovod"], ["group", "MPI", "Horovod"]
GROUP_LAST = ["Horovod", "group"]


@pytest.mark.parametrize(
    ("cluster", "variables", "communication", "steps", "reason"),
    [
        (BY_TF_CONFIG, {}, "auto", MPI_STEPS, FASTER),
        (BY_TF_CONFIG, {}, "gloo", GLOO, SAID),
        (BY_TF_CONFIG, {}, "mpi", MPI_STEPS, SAID),
        (BY_TF_CONFIG, {}, "", GLOO, BY_PROGRAM),
        (BY_TF_CONFIG, {"TFDIST_COMMUNICATION": "mpi"}, "auto", MPI_STEPS, GIVEN),
        (BY_TF_CONFIG, {"TFDIST_COMMUNICATION": "mpi"}, "gloo", GLOO, SAID),
        (BY_TF_CONFIG, {"TFDIST_COMMUNICATION": "gloo"}, "auto", GLOO, GIVEN),
        (BY_TF_CONFIG, {"HOROVOD_CONTROLLER": "gloo"}, "auto", GLOO, "as HOROVOD_CONTROLLER says"),
        (BY_TF_CONFIG, {"HOROVOD_CPU_OPERATIONS": "MPI"}, "auto", MPI_STEPS, "as HOROVOD_CPU_OPERATIONS says"),
        (BY_TF_CONFIG, {"HOROVOD_CPU_OPERATIONS": "mpi"}, "", GLOO, BY_PROGRAM),
        (BY_LAUNCH, PLACED, "gloo", ["group", "Horovod"], SAID),
        (BY_LAUNCH, PLACED, "mpi", MPI_STEPS, SAID),
        (BY_LAUNCH, {**PLACED, "TFDIST_GROUP": "127.0.0.1:1"}, "auto", MPI_STEPS, FASTER),
        (BY_HOROVODRUN, PLACED, "auto", GROUP_LAST, BY_RUN),
        (BY_HOROVODRUN, PLACED, "gloo", GROUP_LAST, SAID),
        (BY_MPIRUN, {"HOROVOD_CONTROLLER": "gloo"}, "auto", GROUP_LAST, "because mpirun started the processes"),
        (BY_MPIRUN, {}, "mpi", GROUP_LAST, "because mpirun started the processes"),
    ],
)
def test_the_library_is_the_users_choice_or_that_of_the_launcher_or_the_faster_one(
    monkeypatch, cluster, variables, communication, steps, reason
):
    """And it decides, with the launcher, who exchanges the addresses."""
    started = Started(monkeypatch, variables)
    started.automatic = LibraryChoice("mpi", FASTER)
    monkeypatch.setattr(horovod_rendezvous.hvd, "mpi_enabled", lambda: True)
    monkeypatch.setattr(horovod_rendezvous, "mpi_library", lambda: "MPICH 4.3.2")
    horovod_rendezvous.start_horovod(cluster, started.join, communication=communication, process_sets="dynamic")
    assert (started.steps, started.options) == (steps, {"process_sets": "dynamic"})
    if "MPI" in steps:
        assert started.libraries == ("mpi", "mpi")
    assert os.environ.get("HOROVOD_CONTROLLER") == variables.get("HOROVOD_CONTROLLER")  # otherwise the user's choice
    assert horovod_rendezvous.describe_communication() == f"Horovod uses MPICH 4.3.2, {reason}."


def test_the_coordinator_is_sent_where_eager_execution_is_disabled(monkeypatch):
    monkeypatch.setattr(horovod_rendezvous.hvd, "broadcast", lambda tensor, root, name: tensor)
    with tf.Graph().as_default():
        found = horovod_rendezvous._broadcast_coordinator(Cluster(0, 2, 0, 2, source="Horovod"))
    assert found.coordinator.startswith("127.0.0.1:")


MPI = {**PLACED, "TFDIST_COMMUNICATION": "mpi"}


@pytest.mark.parametrize(
    ("cluster", "variables", "communication", "message"),
    [
        (BY_MPIRUN, {}, "gloo", "--communication=gloo is for processes that mpirun has not started. Received: "),
        (
            BY_HOROVODRUN,
            PLACED,
            "mpi",
            "^--communication=mpi is for .* Received: a job of horovodrun. Use `tfdist launch",
        ),
        (BY_HOROVODRUN, MPI, "", "^TFDIST_COMMUNICATION=mpi is for jobs whose "),
        (BY_TF_CONFIG, {"TFDIST_COMMUNICATION": "ccl"}, "auto", "must be gloo or mpi. Received: ccl."),
    ],
)
def test_a_library_that_the_launcher_has_not_started_is_refused(
    monkeypatch, cluster, variables, communication, message
):
    started = Started(monkeypatch, variables)
    with pytest.raises(InputError, match=message):
        horovod_rendezvous.start_horovod(cluster, started.join, communication=communication)
    assert started.steps == []


@pytest.mark.parametrize(
    ("variables", "start", "message"),
    [
        (  # some ranks of a job
            MPI,
            lambda: horovod_rendezvous.start_horovod(BY_LAUNCH, lambda cluster: LocalGroup(), comm=[0]),
            r"hvd.init\(comm=...\) over MPI needs mpirun. Received: Horovod's variables.",
        ),
        (
            {},
            lambda: horovod_rendezvous.start_with_group(Others([]), BY_MPIRUN),
            "a process can start Horovod only once.* Received: a second call.",
        ),
    ],
)
def test_what_needs_mpirun_or_a_first_start_is_refused(monkeypatch, variables, start, message):
    started = Started(monkeypatch, variables)
    with pytest.raises(InputError, match=message):
        start()
    assert started.steps == []


def test_a_second_start_takes_the_library_that_the_first_one_chose(monkeypatch):
    started = Started(monkeypatch, {})
    started.automatic = LibraryChoice("mpi", "because it is faster")
    horovod_rendezvous.start_horovod(BY_TF_CONFIG, started.join, communication="auto")
    horovod_rendezvous.start_with_group(Others([]), BY_TF_CONFIG)
    assert started.steps == ["group", "MPI", "Horovod", "MPI", "Horovod"]


def test_the_library_is_that_of_the_first_start(monkeypatch):
    started = Started(monkeypatch, {})
    horovod_rendezvous.start_with_group(Others([]), BY_TF_CONFIG, "mpi")
    with pytest.raises(InputError, match="Horovod keeps the library with which .* Received: gloo after mpi."):
        horovod_rendezvous.start_with_group(Others([]), BY_TF_CONFIG, "gloo")
    assert started.steps == ["MPI", "Horovod"]


def test_processes_that_the_library_of_mpi_does_not_find_are_refused(monkeypatch):
    """Each would be a job of one process, which reduces nothing."""
    monkeypatch.setattr(horovod_rendezvous, "mpi_library", lambda: "Open MPI 5.0.11")
    monkeypatch.setattr(horovod_rendezvous.hvd, "size", lambda: 1)
    monkeypatch.setattr(horovod_rendezvous.hvd, "shutdown", lambda: None)
    with pytest.raises(InputError, match="Received: 2 processes, of which Open MPI 5.0.11 finds only this one. Use"):
        horovod_rendezvous._check_size(BY_MPIRUN, {})


@pytest.mark.parametrize(
    ("library", "message"),
    [
        ("", "requires Horovod built with MPI. Received: Horovod without MPI. Run `pip install mpich` and "),
        ("Open MPI 5.0.11", "Open MPI needs processes started by mpirun. Received: Horovod with Open MPI 5.0.11."),
    ],
)
def test_a_horovod_that_cannot_start_mpi_is_refused(monkeypatch, library, message):
    monkeypatch.setattr(horovod_rendezvous, "mpi_library", lambda: library)
    with pytest.raises(InputError, match=message):
        horovod_rendezvous.initialize_mpi(LocalGroup(), ["127.0.0.1"], 5.0)


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("MPICH Version:      4.3.2\nMPICH Release date: Tue\nMPICH ABI: 17:2:5\n", "MPICH 4.3.2"),
        ("Open MPI v5.0.11, package: Open MPI root@host Distribution, ident: 5.0.11, repo rev: 1", "Open MPI 5.0.11"),
        ("Intel(R) MPI Library 2021.11 for Linux* OS\n", "Intel(R) MPI Library 2021.11 for Linux* OS"),
    ],
)
def test_a_library_has_its_name_and_version(version, name):
    assert horovod_rendezvous.library_name(version) == name


ONE_HOST = Cluster(1, 4, 1, 4, source="TF_CONFIG")
WITH_GROUP = {"HOROVOD_RANK": "1", "TFDIST_GROUP": "127.0.0.1:1"}
MPICH = "MPICH 4.3.2"


def test_mpi_is_taken_where_each_rank_has_a_core_beside_the_one_that_polls():
    for cluster, environment in ((ONE_HOST, {}), (dataclasses.replace(ONE_HOST, source="Horovod"), WITH_GROUP)):
        found = rank_choice(cluster, 2, MPICH, False, environment)
        assert found == LibraryChoice("mpi", "because all ranks are on one host, with 2 cores each")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cluster": Cluster()}, "this is a single process"),
        ({"cluster": Cluster(1, 4, 1, 2)}, "the job is on several hosts"),
        ({"env": {"TFDIST_ELASTIC": "1"}}, "the job is elastic"),
        ({"env": {"HOROVOD_ELASTIC": "1"}}, "the job is elastic"),
        ({"env": {"HOROVOD_RANK": "1"}}, "horovodrun started the processes"),
        ({"has_gpus": True}, "the ranks have GPUs"),
        ({"cores": 1}, "MPI needs 2 cores per rank, of which it keeps one busy, and there are 1"),
        ({"cores": 1.5}, "MPI needs 2 cores per rank, of which it keeps one busy, and there are 1.5"),
        ({"mpi": ""}, "Horovod was built without MPI"),
        ({"mpi": "Open MPI 5.0.11"}, "only mpirun can start Open MPI 5.0.11"),
    ],
)
def test_gloo_is_taken_elsewhere_and_the_reason_said(changes, reason):
    given = {"cluster": ONE_HOST, "cores": 8, "mpi": MPICH, "has_gpus": False, "env": {}, **changes}
    assert rank_choice(**given) == LibraryChoice("gloo", f"because {reason}")


class Job:
    """A group of three ranks, with given choices of the others."""

    def __init__(self, *others):
        self.others = others

    def gather(self, name, value):
        return [*map(list, self.others), value]


@pytest.fixture
def large_host(monkeypatch):
    monkeypatch.setattr(horovod_rendezvous, "cores_per_process", lambda local_size, assigned: 8)
    monkeypatch.setattr(horovod_rendezvous, "cpu_quota", lambda: 24.0)
    monkeypatch.setattr(horovod_rendezvous, "mpi_library", lambda: MPICH)
    monkeypatch.setattr(horovod_rendezvous.tf.config, "list_physical_devices", lambda kind: [])
    for name in ("HOROVOD_RANK", *horovod_rendezvous.ELASTIC_VARIABLES):
        monkeypatch.delenv(name, raising=False)


def test_one_rank_that_has_a_reason_against_mpi_decides_for_all(large_host):
    mine, cores = (
        LibraryChoice("mpi", "because all ranks are on one host, with 6 cores each"),
        LibraryChoice("gloo", "because cores"),
    )
    assert choose_library(Job(mine, mine), ONE_HOST) == mine
    assert choose_library(Job(mine, cores), ONE_HOST) == cores
    assert choose_library(Job(cores, LibraryChoice("gloo", "because gpus")), ONE_HOST) == cores


def test_a_limit_of_the_container_counts_as_fewer_cores(large_host, monkeypatch):
    monkeypatch.setattr(horovod_rendezvous, "cpu_quota", lambda: 4.0)
    assert choose_library(Job(), ONE_HOST).reason.endswith("and there are 1")
