"""Commits whose files are on several hosts: each host gets the files it lacks. Real processes, with a directory for each."""

import ast
import logging
import pathlib
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests import processes
from tests.checkpoint.damaging import flip_last
from tests.coordination.members import members
from tests.workers import running
from tfdist.checkpoint import replication
from tfdist.checkpoint.format import (
    Checkpoint,
    HostPlacement,
    TensorBlock,
    complete_checkpoints,
    copy_holder,
    shard_bytes,
    write_checkpoint,
)
from tfdist.coordination import LocalGroup
from tfdist.errors import InputError

pytestmark = pytest.mark.processes

RANKS = 3
HOSTS = [[rank] for rank in range(RANKS)]


class Strategy:
    def __init__(self, group):
        self.group, self.is_chief = group, group.rank == 0


def own(rank: int, step: int) -> list[TensorBlock]:
    return [TensorBlock("error", (RANKS * 100, 7), (rank * 100, 0), np.full((100, 7), step + rank, np.float32))]


def write(home: pathlib.Path, folder: str, step: int) -> None:
    def one(group) -> None:
        copies = {rank: shard_bytes(own(rank, step)) for rank in range(RANKS) if copy_holder(rank, HOSTS) == group.rank}
        replicated = [TensorBlock.full("w", np.full(1234, step, np.float64))]
        place, over = home / f"host{group.rank}" / folder, HostPlacement(HOSTS, replicated, copies)
        write_checkpoint(
            group, place, own(group.rank, step), step=step, seed=0, flags={}, values=step, keep=9, placement=over
        )

    with members(RANKS) as joined, ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(one, joined))


def hosts(home: pathlib.Path, folder: str) -> list[pathlib.Path]:
    return [home / f"host{rank}" / folder for rank in range(RANKS)]


def lose(commits: list[pathlib.Path]) -> None:
    for path in commits:
        shutil.rmtree(path)


def damage_a_file_of_each(commits: list[pathlib.Path]) -> None:
    for rank, path in enumerate(commits):
        flip_last(path / f"shard-{rank:05d}.safetensors")


def damage_what_all_have_alike(commits: list[pathlib.Path]) -> None:
    """The only intact copy is on a host with a damaged manifest."""
    flip_last(commits[0] / "shard-00003.safetensors")
    flip_last(commits[1] / "manifest.json")
    flip_last(commits[2] / "shard-00003.safetensors")
    shutil.rmtree(commits[1].with_name("step-000000020"))


def write_it_on_one_host(commits: list[pathlib.Path]) -> None:
    for path in commits[1:]:
        path.rename(path.with_name(f".{path.name}.partial"))


CASES = {
    "nothing is amiss": (lambda commits: None, 30),
    "one host is new": (lambda commits: lose([commits[0].parent]), 30),
    "one host is left of three": (lambda commits: lose([commit.parent for commit in commits[:2]]), None),
    "a file of each is damaged": (damage_a_file_of_each, 30),
    "what all have alike is damaged": (damage_what_all_have_alike, 20),
    "one host was done with it": (write_it_on_one_host, 20),
}


@pytest.mark.parametrize("name", ["horovod", pytest.param("multiworker", marks=pytest.mark.full)])
def test_each_host_gets_what_only_others_have(name: str, tmp_path: pathlib.Path) -> None:
    if name == "horovod":
        pytest.importorskip("horovod.tensorflow")
    for folder, (happens, _) in CASES.items():
        for step in (20, 30):
            write(tmp_path, folder, step)
        happens([host / "step-000000030" for host in hosts(tmp_path, folder)])
    outputs = processes.finish(running.command("sharing", name, tmp_path, *CASES), RANKS)
    for folder, (_, step) in CASES.items():
        newest_whole = [f"step-{step:09d}"] if step else []
        for host, output in zip(hosts(tmp_path, folder), outputs, strict=True):
            found = next(line for line in output.splitlines() if line.startswith(f"{folder}: "))
            assert sorted(ast.literal_eval(found.partition(": ")[2]), reverse=True)[:1] == newest_whole, found
            if step:
                checkpoint = Checkpoint.open(host / newest_whole[0])
                checkpoint.verify()
                assert checkpoint.read("error")[::100, 0].tolist() == [step, step + 1, step + 2]
                assert checkpoint.read("w").tolist() == [step] * 1234
    assert (
        "Ignoring the in-memory checkpoint step-000000030: the hosts of this attempt do not have all of its files."
        in outputs[0]
    )


def test_ranks_that_see_one_directory_are_on_one_host(tmp_path: pathlib.Path) -> None:
    def found(group) -> list[list[int]]:
        return replication.ranks_by_directory(group, tmp_path / f"host{group.rank % 2}" / "new")

    with members(5) as joined, ThreadPoolExecutor(5) as pool:
        for _ in range(2):
            assert list(pool.map(found, joined)) == [[[0, 2, 4], [1, 3]]] * 5
    assert sorted(path.name for path in (tmp_path / "host0" / "new").iterdir()) == [".host"]


def test_a_directory_that_one_rank_cannot_write_is_named_to_all(tmp_path: pathlib.Path) -> None:
    (tmp_path / "host1").write_text("a file")

    def found(group) -> str:
        with pytest.raises(InputError) as caught:
            replication.ranks_by_directory(group, tmp_path / f"host{group.rank}")
        return str(caught.value)

    with members(2) as joined, ThreadPoolExecutor(2) as pool:
        [said] = set(pool.map(found, joined))
    assert f"Received, on rank 1: {tmp_path / 'host1'} (File exists)." in said


def test_a_host_that_cannot_write_a_commit_leaves_it_to_the_others(tmp_path, monkeypatch, caplog) -> None:
    """As with full memory: no host uses that commit, and none is removed."""
    write(tmp_path, "commits", 30)
    lose([hosts(tmp_path, "commits")[1]])

    class Carrier:
        max_bytes = 1 << 18

        def __init__(self, strategy):
            self.group = strategy.group

        def send(self, data, process):
            sent = self.group.gather("sent", [data.tolist(), process])
            return {rank: np.array(each, np.uint8) for rank, (each, _) in enumerate(sent)}

    written = replication._write_piece

    def full(path, *given):
        wrong = written(path, *given)
        return f"{path.parent} (No space left on device)" if "host1" in str(path) else wrong

    monkeypatch.setattr(replication, "ByteTransfer", Carrier)
    monkeypatch.setattr(replication, "can_transfer", lambda strategy: True)
    monkeypatch.setattr(replication, "_write_piece", full)
    with members(RANKS) as joined, ThreadPoolExecutor(RANKS) as pool, caplog.at_level(logging.WARNING):
        found = list(
            pool.map(
                lambda g: replication.replicate_newest_checkpoint(Strategy(g), hosts(tmp_path, "commits")[g.rank]),
                joined,
            )
        )
    assert found == [[]] * RANKS
    assert [len(complete_checkpoints(host)) for host in hosts(tmp_path, "commits")] == [1, 0, 1]
    assert "Rank 1 cannot write the in-memory checkpoint step-000000030: " in caplog.text


def test_two_good_commits_of_one_step_are_not_one(tmp_path, monkeypatch) -> None:
    """Each of two hosts has all files of a different commit: neither is used."""
    for rank in range(2):
        same = {"flags": {}, "values": 0, "keep": 9}
        write_checkpoint(
            LocalGroup(), tmp_path / f"host{rank}", [TensorBlock.full("w", np.arange(9))], step=20, seed=0, **same
        )
        write_checkpoint(
            LocalGroup(), tmp_path / f"host{rank}", [TensorBlock.full("w", np.full(9, rank))], step=30, seed=0, **same
        )
    monkeypatch.setattr(replication, "can_transfer", lambda strategy: True)
    with members(2) as joined, ThreadPoolExecutor(2) as pool:
        found = list(
            pool.map(lambda g: replication.replicate_newest_checkpoint(Strategy(g), tmp_path / f"host{g.rank}"), joined)
        )
    assert found == [["step-000000020"]] * 2


def test_where_a_host_cannot_have_the_folder_it_is_left_out(tmp_path, monkeypatch) -> None:
    (tmp_path / "host1").write_text("a file")
    monkeypatch.setattr(replication, "can_transfer", lambda strategy: True)
    with members(2) as joined, ThreadPoolExecutor(2) as pool:
        found = list(
            pool.map(lambda g: replication.replicate_newest_checkpoint(Strategy(g), tmp_path / f"host{g.rank}"), joined)
        )
    assert found == [[]] * 2


def test_a_strategy_without_collectives_between_processes_is_refused(mesh2x2) -> None:
    with pytest.raises(
        InputError, match="Received: mesh, which has no collectives between processes. Set --commit_dir"
    ):
        replication.ByteTransfer(mesh2x2)
