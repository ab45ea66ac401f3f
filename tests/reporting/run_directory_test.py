import json
import os

import pytest

from tfdist.errors import InputError
from tfdist.reporting import RunDirectory

GLOO = "Horovod uses Gloo, because it may."


def create(path) -> RunDirectory:
    return RunDirectory.create(
        path, flags="--steps=5\n", hosts=["alpha"], communication=GLOO, clock=lambda: 1770000000.0
    )


def assert_refused(path, *words):
    for action in (RunDirectory.check, create):
        with pytest.raises(InputError) as caught:
            action(path)
        message = str(caught.value)
        assert "\n" not in message
        assert "--output_dir" in message
        for word in (str(path), *words):
            assert word in message


def test_a_run_begins_with_its_flags_and_its_environment(tmp_path):
    directory = create(tmp_path / "runs" / "first")
    assert directory.path == tmp_path / "runs" / "first"
    assert directory.flags.read_text() == "--steps=5\n"
    environment = json.loads(directory.environment.read_text())
    assert environment["hosts"] == ["alpha"]
    assert environment["communication"] == GLOO
    assert environment["started"] == "2026-02-02T02:40:00+00:00"
    assert sorted(path.name for path in directory.path.iterdir()) == [
        "environment.json",
        "flags.txt",
        "logs",
        "starts.jsonl",
    ]


def test_an_empty_model_is_that_of_no_finished_run(tmp_path):
    """As after a failure of the machine."""
    directory = create(tmp_path)
    assert not directory.is_done
    directory.model.touch()
    assert not directory.is_done
    directory.model.write_bytes(b"model")
    assert directory.is_done


def test_the_names_of_the_files(tmp_path):
    directory = RunDirectory(tmp_path)
    named = (directory.metrics, directory.curves, directory.model, directory.tensorboard, directory.log(3))
    assert [str(path.relative_to(tmp_path)) for path in named] == [
        "metrics.jsonl",
        "curves.png",
        "model.keras",
        "tensorboard",
        os.path.join("logs", "rank-3.log"),
    ]


def test_an_empty_directory_is_taken(tmp_path):
    assert create(tmp_path).path == tmp_path


def test_a_launcher_may_have_written_its_logs(tmp_path):
    log = RunDirectory(tmp_path).log(0)
    log.parent.mkdir()
    log.write_text("starting\n")
    create(tmp_path)
    assert log.read_text() == "starting\n"


@pytest.mark.parametrize("killed_at", range(3))
def test_a_start_that_was_killed_is_made_again(killed_at, tmp_path, monkeypatch):
    """Killed before the rename of any of the files."""
    replaced = []

    def replace(partial, path, replace=os.replace):
        if len(replaced) == killed_at:
            raise KeyboardInterrupt
        replaced.append(replace(partial, path))

    with monkeypatch.context() as killing, pytest.raises(KeyboardInterrupt):
        killing.setattr(os, "replace", replace)
        create(tmp_path)
    directory = RunDirectory(tmp_path)
    if not directory.is_run:
        directory.check(tmp_path)
    assert directory.is_run == (killed_at > 0)
    assert directory.begin("--steps=5\n", ["alpha"]) == (killed_at > 0)
    assert directory.flags.read_text() == "--steps=5\n"


def test_another_run_is_never_written_over(tmp_path):
    create(tmp_path)
    assert_refused(tmp_path, "empty")


def test_a_check_makes_nothing(tmp_path):
    RunDirectory.check(tmp_path / "runs" / "first")
    assert not list(tmp_path.iterdir())


def test_a_file_is_no_directory(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert_refused(file, "not a directory")
    assert_refused(file / "below", "not a directory")


def test_a_place_without_permission_is_refused(tmp_path, monkeypatch):
    # The superuser may write anywhere, so the system's answer is faked.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert_refused(tmp_path / "new", "no permission", str(tmp_path))


def test_what_the_system_refuses_is_told_in_its_words(tmp_path):
    assert_refused(tmp_path / ("x" * 300), "File name too long")
    with pytest.raises(InputError, match="Received: /proc/nowhere"):
        create("/proc/nowhere")


def test_a_url_of_an_unknown_storage():
    for action in (RunDirectory.check, create):
        with pytest.raises(InputError, match="known storage: file://.* Received: gs://bucket/run. Give another path"):
            action("gs://bucket/run")


def test_the_home_directory_may_be_abbreviated(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert create("~/run").path == tmp_path / "run"


def test_a_run_that_has_finished_says_so_until_it_begins_again(tmp_path):
    directory = create(tmp_path)
    assert directory.finished == {}
    directory.finish({"step": 5})
    assert directory.finished == {}, "a run without a model has not finished"
    directory.model.write_text("model")
    assert directory.finished == {"step": 5}
    directory.begin("--steps=9\n", ["alpha"])
    assert directory.finished == {}


def test_only_the_files_of_a_run_are_deleted(tmp_path):
    directory = create(tmp_path)
    own = ["metrics.jsonl", "metrics-dropped.jsonl", "curves.png", "model.keras", "finished.json"]
    own += ["outcome.json", "loggers.json"]
    own += ["checkpoints/step-000000005/manifest.json", "checkpoints/.step-000000006.partial/index-00000.json"]
    own += ["checkpoints/step-000000004.damaged/manifest.json", "ledger/start-0-rank-1.bin"]
    own += ["tensorboard/train/events.out.tfevents.1.host", "tensorboard/plugins/profile/one"]
    others = ["notes.txt", "checkpoints/mine/a", "checkpoints/step-5", "ledger/note", "tensorboard/events.mine", "lock"]
    others += ["export-000000005/a", "logs/rank-0.log"]
    for name in (*own, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    directory.clear()
    assert not directory.is_run
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == sorted(others)


def test_a_deletion_that_was_interrupted_leaves_a_run(tmp_path, monkeypatch):
    directory = create(tmp_path)
    monkeypatch.setattr(
        type(directory._storage), "remove_directory", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    (tmp_path / "checkpoints" / "step-000000005").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt):
        directory.clear()
    assert directory.is_run and not directory.is_done
