"""The library that `--communication=auto` takes where the user names none."""

import dataclasses

import pytest

pytest.importorskip("horovod")

from tfdist.cluster.environment import Cluster
from tfdist.distribution import horovod_rendezvous
from tfdist.distribution.horovod_rendezvous import Choice, choose_library, rank_choice

ONE_HOST = Cluster(1, 4, 1, 4, source="TF_CONFIG")
BY_LAUNCH = {"HOROVOD_RANK": "1", "TFDIST_GROUP": "127.0.0.1:1"}
MPICH = "MPICH 4.3.2"


def test_mpi_is_taken_where_each_rank_has_a_core_beside_the_one_that_polls():
    for cluster, environment in ((ONE_HOST, {}), (dataclasses.replace(ONE_HOST, source="Horovod"), BY_LAUNCH)):
        found = rank_choice(cluster, 2, MPICH, False, environment)
        assert found == Choice("mpi", "because all ranks are on one host, with 2 cores each")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cluster": Cluster()}, "this is one process"),
        ({"cluster": Cluster(1, 4, 1, 2)}, "the job is on several hosts"),
        ({"environment": {"TFDIST_ELASTIC": "1"}}, "the job is elastic"),
        ({"environment": {"HOROVOD_ELASTIC": "1"}}, "the job is elastic"),
        ({"environment": {"HOROVOD_RANK": "1"}}, "horovodrun started the processes"),
        ({"has_gpus": True}, "the ranks have GPUs"),
        ({"cores": 1}, "MPI needs 2 cores per rank, of which it keeps one busy, and there are 1"),
        ({"cores": 1.5}, "MPI needs 2 cores per rank, of which it keeps one busy, and there are 1.5"),
        ({"mpi": ""}, "Horovod was built without MPI"),
        ({"mpi": "Open MPI 5.0.11"}, "only mpirun can start Open MPI 5.0.11"),
    ],
)
def test_gloo_is_taken_elsewhere_and_the_reason_said(changes, reason):
    given = {"cluster": ONE_HOST, "cores": 8, "mpi": MPICH, "has_gpus": False, "environment": {}, **changes}
    assert rank_choice(**given) == Choice("gloo", f"because {reason}")


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
    mine, cores = Choice("mpi", "because all ranks are on one host, with 6 cores each"), Choice("gloo", "because cores")
    assert choose_library(Job(mine, mine), ONE_HOST) == mine
    assert choose_library(Job(mine, cores), ONE_HOST) == cores
    assert choose_library(Job(cores, Choice("gloo", "because gpus")), ONE_HOST) == cores


def test_a_limit_of_the_container_counts_as_fewer_cores(large_host, monkeypatch):
    monkeypatch.setattr(horovod_rendezvous, "cpu_quota", lambda: 4.0)
    assert choose_library(Job(), ONE_HOST).reason.endswith("and there are 1")
