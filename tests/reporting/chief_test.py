import io
import json

from tfdist.reporting import RunDirectory, RunPlan, chief_reporter


def test_a_run_leaves_every_file_and_plain_lines(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", flags="", hosts=["alpha"])
    stream = io.StringIO()
    reporter = chief_reporter(directory, stream)
    reporter.start(RunPlan(total_steps=2, batch_size=4, examples_per_epoch=8))
    reporter.progress(1, {"loss": 1.0})
    reporter.record({"kind": "train", "step": 2, "loss": 0.5, "accuracy": 0.5})
    reporter.record({"kind": "eval", "step": 2, "loss": 0.25, "accuracy": 0.75})
    reporter.close("done")
    assert [json.loads(line)["kind"] for line in directory.metrics.read_text().splitlines()] == ["train", "eval"]
    assert directory.curves.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in directory.tensorboard.iterdir()) == ["eval", "train"]
    assert stream.getvalue().splitlines() == [
        "step 2/2  epoch 1/1  train  loss 0.5000  accuracy 0.5000",
        "step 2/2  epoch 1/1  eval  loss 0.2500  accuracy 0.7500",
        "run ended: done",
    ]
