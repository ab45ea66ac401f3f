"""A run with all durable files in a storage other than the file system, which no code bypasses."""

import keras

from tests.end_to_end.resume.command_test import run
from tests.storage.mangled import registered
from tfdist import checkpoints, export, ledger
from tfdist.checkpoint.format import complete_checkpoints
from tfdist.export import ExportConfig
from tfdist.reporting import RunDirectory
from tfdist.storage import path_of

URL = "test://bucket/runs/first"


def test_a_run_is_saved_resumed_proved_and_exported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # where a URL mistaken for a local path would be created
    storage = registered(tmp_path / "root")
    run(URL, steps=10, eval_every=5, log_every=5)
    run(URL, steps=20, commit_every=5, commit_dir=str(tmp_path / "root" / "memory"))
    directory = RunDirectory(path_of(URL))
    assert [start["step"] for start in directory.read_starts()] == [0, 10]
    assert directory.read_starts()[1]["checkpoint"] == f"{URL}/checkpoints/step-000000010"
    assert [path.name for path in complete_checkpoints(directory.checkpoints)] == ["step-000000020", "step-000000010"]
    assert {record["step"] for record in directory.records()} == {5, 10, 20}
    assert ledger.main(URL) == 0
    assert checkpoints.main(URL) == 0
    for kind in ("keras", "safetensors"):
        export.main(URL, ExportConfig(format=kind))
    shown = capsys.readouterr().out
    for text in ("Proved: 20 steps", "step-000000010  good", f"{URL}/export-000000020.keras  step 20, from {URL}"):
        assert text in shown
    names = {entry.name for entry in storage.entries(directory.path)}
    assert names == {
        *("metrics.jsonl", "metrics-dropped.jsonl", "starts.jsonl", "flags.txt", "environment.json", "lock"),
        *("checkpoints", "ledger", "logs", "tensorboard", "curves.png", "model.keras", "outcome.json", "finished.json"),
        *("export-000000020.keras", "export-000000020.safetensors"),
    }
    assert len(storage.entries(directory.tensorboard / "train")) == 4  # two per start: events and a mark
    assert b"Resuming from test://" in storage.read(directory.log(0))
    (tmp_path / "root" / "a.keras").write_bytes(storage.read(directory.path / "export-000000020.keras"))
    assert keras.saving.load_model(tmp_path / "root" / "a.keras").count_params() > 0
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
