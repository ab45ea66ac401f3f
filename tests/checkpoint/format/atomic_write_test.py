import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.waiting import read_line
from tfdist.checkpoint.format import Checkpoint, TensorBlock, atomic_write, complete_checkpoints, remove_remnants
from tfdist.checkpoint.format.entries import Index
from tfdist.errors import CheckpointError, ExitCode, PeerLostError

SMALL = [TensorBlock.full("w", np.arange(12.0))]


def rows(rank: int, size: int) -> list[TensorBlock]:
    """Returns a rank's rows of a matrix."""
    return [TensorBlock("w", (2 * size, 3), (2 * rank, 0), np.full((2, 3), rank, np.int32))]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def assert_all_know(found: list, *words: str) -> str:
    """Asserts that every rank has raised the same error, with these words."""
    assert [type(one) for one in found] == [CheckpointError] * len(found)
    [message] = {str(one) for one in found}
    assert "\n" not in message
    assert found[0].exit_code == ExitCode.FAILED
    for word in words:
        assert word in message
    return message


def test_ranks_write_one_checkpoint(tmp_path, write, on_ranks):
    def parts(rank: int) -> list[TensorBlock]:
        return [] if rank == 1 else rows(rank // 2, 2)  # rank 1 has nothing to write

    paths = on_ranks(3, lambda group: write(tmp_path / "new" / "checkpoints", parts(group.rank), group, step=7))
    assert set(paths) == {tmp_path / "new" / "checkpoints" / "step-000000007"}
    assert names(paths[0]) == ["manifest.json", "shard-00000.safetensors", "shard-00002.safetensors"]
    assert Checkpoint.open(paths[0]).read("w").tolist() == [[0] * 3] * 2 + [[1] * 3] * 2


def test_what_rank_0_says_counts(tmp_path, write, on_ranks):
    paths = on_ranks(2, lambda group: write(tmp_path, rows(group.rank, 2), group, values={"rank": group.rank}))
    assert Checkpoint.open(paths[0]).values == {"rank": 0}


def test_what_another_left_is_in_nobodys_way(tmp_path, write):
    for step in (1, 2):
        write(tmp_path, SMALL, step=step)
    for name in (".step-000000120.partial", ".step-000000001.pruned", ".step-000000120.replaced"):
        shutil.copytree(tmp_path / "step-000000001", tmp_path / name)
    left = tmp_path / ".step-000000120.partial"
    (left / "shard-00000.safetensors").write_text("half of it")
    (left / "index-00001.json").write_text("of another size")
    assert names(write(tmp_path, SMALL, keep=2)) == ["manifest.json", "shard-00000.safetensors"]
    assert names(tmp_path) == ["step-000000002", "step-000000120"]


@pytest.fixture
def read_by_somebody(monkeypatch) -> set[str]:
    """Directories in which a file is being read: as on NFS, they cannot be removed, and the file is renamed."""
    remove, read = shutil.rmtree, set()

    def rmtree(path: Path, *given: object, **named: object) -> None:
        if path.name not in read:
            remove(path, *given, **named)
        elif not named.get("ignore_errors"):
            for file in path.iterdir():
                file.rename(path / ".nfs0001")
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    return read


def test_an_old_one_that_cannot_be_removed_is_one_warning(tmp_path, write, on_ranks, read_by_somebody, caplog):
    """The next write removes it. The new checkpoint is not affected."""
    read_by_somebody.update({".step-000000001.pruned", ".step-000000003.pruned"})
    for step in range(1, 6):
        paths = on_ranks(2, lambda group, step=step: write(tmp_path, rows(group.rank, 2), group, step=step, keep=1))
        assert paths == [tmp_path / f"step-00000000{step}"] * 2
        Checkpoint.open(paths[0]).verify()
    left = [".step-000000001.pruned", ".step-000000003.pruned"]
    assert names(tmp_path) == [*left, "step-000000005"]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / name} could not be removed (Directory not empty). Its removal will be retried later."
        for name in left
    ]
    read_by_somebody.clear()
    write(tmp_path, SMALL, step=6, keep=1)
    assert names(tmp_path) == ["step-000000006"]


def test_an_old_one_that_cannot_be_renamed_is_one_warning(tmp_path, write, monkeypatch, caplog):
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name == "step-000000001":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        for step in range(1, 5):
            write(tmp_path, SMALL, step=step, keep=1)
    assert names(tmp_path) == ["step-000000001", "step-000000004"]
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"{tmp_path / 'step-000000001'} could not be removed (Device or resource busy)")
    write(tmp_path, SMALL, step=5, keep=1)
    assert names(tmp_path) == ["step-000000005"]


def test_the_same_step_again_and_again_though_nothing_of_it_can_be_removed(tmp_path, write, read_by_somebody):
    kinds = ("partial", "replaced", "pruned", "pruned-2", "pruned-3", "pruned-4")
    read_by_somebody.update({f".step-000000120.{kind}" for kind in kinds})
    (tmp_path / ".step-000000120.partial").mkdir()
    (tmp_path / ".step-000000120.partial" / "shard-00000.safetensors").write_text("half of it")
    for value in range(4):
        Checkpoint.open(write(tmp_path, SMALL, values=value)).verify()
    assert Checkpoint.open(tmp_path / "step-000000120").values == 3
    assert complete_checkpoints(tmp_path) == [tmp_path / "step-000000120"]
    read_by_somebody.clear()
    write(tmp_path, SMALL)
    assert names(tmp_path) == ["step-000000120"]


def test_a_disk_that_one_rank_does_not_share(tmp_path, write, on_ranks):
    write(tmp_path / "0", SMALL, step=1)
    found = on_ranks(3, lambda group: write(tmp_path / str(group.rank // 2), rows(group.rank, 3), group))
    shard = tmp_path / "1" / ".step-000000120.partial" / "shard-00002.safetensors"
    assert_all_know(found, f"rank 2: [Errno 2] No such file or directory: '{shard}'", "for step-000000120")
    assert names(tmp_path / "0") == ["step-000000001"]


def test_a_disk_that_looks_shared(tmp_path, write, on_ranks):
    (tmp_path / "1" / ".step-000000120.partial").mkdir(parents=True)
    found = on_ranks(2, lambda group: write(tmp_path / str(group.rank), rows(group.rank, 2), group))
    assert_all_know(found, "rank 0: the shard of rank 1 is missing")
    assert names(tmp_path / "0") == []


def test_a_shard_that_arrives_in_part(tmp_path, write, on_ranks, monkeypatch):
    true = atomic_write.write_shard

    def cut(directory: Path, rank: int, parts: list[TensorBlock]) -> Index:
        index = true(directory, rank, parts)
        if rank:
            os.truncate(directory / "shard-00001.safetensors", 100)
        return index

    monkeypatch.setattr(atomic_write, "write_shard", cut)
    found = on_ranks(2, lambda group: write(tmp_path, rows(group.rank, 2), group))
    assert_all_know(found, "shard-00001.safetensors must have ")
    assert names(tmp_path) == []


def test_no_directory_can_be_made(write, on_ranks):
    found = on_ranks(2, lambda group: write(Path("/proc/checkpoints"), rows(group.rank, 2), group))
    assert_all_know(found, "rank 0: [Errno 2] No such file or directory: '/proc/checkpoints'")


@pytest.mark.parametrize("name", ["shard-00000", "manifest"])
@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_disk_that_is_full(name, call, tmp_path, write, on_ranks, monkeypatch):
    write(tmp_path, SMALL, step=1)
    true = getattr(os, call)

    def full(descriptor: int, *rest: object) -> int:
        if name in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return true(descriptor, *rest)

    monkeypatch.setattr(os, call, full)
    found = on_ranks(2, lambda group: write(tmp_path, rows(group.rank, 2), group))
    assert_all_know(found, "rank 0: [Errno 28] No space left on device: '", f".step-000000120.partial/{name}")
    assert names(tmp_path) == ["step-000000001"]


def test_blocks_that_do_not_make_a_tensor(tmp_path, write, on_ranks):
    found = on_ranks(2, lambda group: write(tmp_path, rows(group.rank, 3), group))
    assert_all_know(found, "rank 0: the blocks of w do not have its number of elements, 18")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"values": float("nan")}, "Out of range float values are not JSON compliant"),
        ({"values": np.float32(1)}, "TypeError('Object of type float32 is not JSON serializable')"),
        ({"seed": None}, "seed of the manifest is None"),
        ({"step": 2**63}, "step is 9223372036854775808"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(given, words, tmp_path, write, on_ranks):
    found = on_ranks(2, lambda group: write(tmp_path, rows(group.rank, 2), group, **given))
    assert_all_know(found, f"rank 0: {words}")
    assert names(tmp_path) == []


def test_an_error_of_any_kind_is_told(tmp_path, write, on_ranks, monkeypatch):
    def fail(partial: Path, rank: int, parts: list[TensorBlock]) -> Index:
        if 0 < rank < 6:
            raise RuntimeError("two\nlines")
        return Index({}, {})

    monkeypatch.setattr(atomic_write, "write_shard", fail)
    found = on_ranks(6, lambda group: write(tmp_path, [], group))
    message = assert_all_know(found, "rank 1: RuntimeError('two\\nlines'); rank 2: ", "; and 2 more ranks.")
    assert "rank 4" not in message


def test_a_rank_that_is_lost(tmp_path, write, on_ranks):
    write(tmp_path, SMALL, step=1)

    def one(group):
        if group.rank:
            group.leave(1, "killed")
        else:
            write(tmp_path, rows(0, 2), group)

    assert isinstance(on_ranks(2, one)[0], PeerLostError)
    assert names(tmp_path) == ["step-000000001"]


def test_a_rank_that_does_not_come(tmp_path, write, on_ranks):
    found = on_ranks(2, lambda group: group.rank or write(tmp_path, SMALL, group, deadline=0.2))
    assert isinstance(found[0], PeerLostError)
    assert names(tmp_path) == []


_CHILD = """
import os, sys, time
import numpy as np
from tfdist.checkpoint.format import TensorBlock, write_checkpoint
from tfdist.coordination import LocalGroup
assert "tensorflow" not in sys.modules
directory, number = sys.argv[1], int(sys.argv[2])

def write(step):
    parts = [TensorBlock.full("w", np.full(1 << 19, step, np.int32))]
    write_checkpoint(LocalGroup(), directory, parts, step=step, seed=1, flags={}, values=None, keep=3)

write(1)
true, calls = os.fsync, []
def fsync(descriptor):
    calls.append(descriptor)
    if len(calls) == number:
        print("now", flush=True)
        time.sleep(60)
    true(descriptor)
os.fsync = fsync
write(2)
"""


# Killed at the write of the shard, the manifest, or their directory; and after the rename.
@pytest.mark.parametrize(("number", "last"), [(1, 1), (2, 1), (3, 1), (4, 2)])
def test_a_process_that_is_killed_leaves_the_last_whole_one(number, last, tmp_path):
    command = [sys.executable, "-c", _CHILD, str(tmp_path), str(number)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert read_line(process.stdout) == "now\n"
        process.kill()
    assert [path.name for path in complete_checkpoints(tmp_path)] == [
        f"step-00000000{step}" for step in range(last, 0, -1)
    ]
    checkpoint = Checkpoint.open(complete_checkpoints(tmp_path)[0])
    assert checkpoint.read("w").tolist() == [last] * (1 << 19)
    checkpoint.verify()
    assert len(names(tmp_path)) == 2
    remove_remnants(tmp_path)
    assert len(names(tmp_path)) == last
