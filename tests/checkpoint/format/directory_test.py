from pathlib import Path

import pytest

from tfdist.checkpoint.format import complete_checkpoints, mark_damaged, remove_remnants
from tfdist.checkpoint.format.directory import checkpoint_name, prune, publish


def make(directory, *names: str, text: str = "as it was"):
    for one in names:
        (directory / one).mkdir(parents=True)
        (directory / one / "file").write_text(text)


def names(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_newest_comes_first_and_others_do_not_come(tmp_path):
    whole = [checkpoint_name(step) for step in (9, 120, 2_000_000_000)]
    make(tmp_path, *whole, ".step-000000130.partial", ".step-000000120.replaced", "step-000000140.damaged", "step-7")
    make(tmp_path, "step-00000015x", "step-٠٠٠٠٠٠٠٠٠", "other")
    (tmp_path / checkpoint_name(500)).write_text("a file")
    (tmp_path / checkpoint_name(501)).symlink_to(tmp_path / checkpoint_name(120))
    assert [path.name for path in complete_checkpoints(tmp_path)] == whole[::-1]
    assert complete_checkpoints(tmp_path / "nowhere") == []


def test_what_is_set_aside_is_not_found_and_never_lost(tmp_path):
    moved = []
    for _ in range(3):
        make(tmp_path, checkpoint_name(120))
        moved.append(mark_damaged(tmp_path / checkpoint_name(120)).name)
        assert complete_checkpoints(tmp_path) == []
    assert moved == [f"step-000000120.damaged{more}" for more in ("", "-2", "-3")]
    assert names(tmp_path) == moved


def test_what_killed_processes_left_is_removed(tmp_path):
    stays = [checkpoint_name(120), "step-000000100.damaged", "other", ".other.partial"]
    make(tmp_path, *stays, ".step-000000120.replaced", ".step-000000130.partial", ".step-000000110.pruned")
    remove_remnants(tmp_path)
    assert names(tmp_path) == sorted(stays)
    remove_remnants(tmp_path / "nowhere")


def test_the_former_one_comes_back_if_the_new_one_did_not_get_its_name(tmp_path):
    make(tmp_path, ".step-000000120.replaced", text="former")
    make(tmp_path, ".step-000000120.partial", text="new")
    remove_remnants(tmp_path)
    assert names(tmp_path) == [checkpoint_name(120)]
    assert (tmp_path / checkpoint_name(120) / "file").read_text() == "former"


def test_one_of_the_same_step_stays_if_the_new_one_cannot_have_its_name(tmp_path, monkeypatch):
    make(tmp_path, checkpoint_name(120), ".step-000000120.partial")
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise OSError("Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        publish(tmp_path / ".step-000000120.partial", tmp_path / checkpoint_name(120))
    assert names(tmp_path) == [".step-000000120.partial", checkpoint_name(120)]


@pytest.mark.parametrize(
    ("written", "keep", "stay"),
    [(5, 2, [4, 5]), (5, 1, [5]), (5, 9, [1, 2, 3, 4, 5]), (2, 2, [2, 4, 5]), (2, 1, [2, 5])],
)
def test_the_newest_stay_and_the_one_just_written(written, keep, stay, tmp_path):
    make(tmp_path, *map(checkpoint_name, range(1, 6)), "step-000000001.damaged")
    prune(tmp_path, keep, tmp_path / checkpoint_name(written))
    assert names(tmp_path) == sorted([*map(checkpoint_name, stay), "step-000000001.damaged"])
