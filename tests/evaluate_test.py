"""The commands that evaluate the model of a run, and write its predictions."""

import functools
import itertools
import json
import sys
import zipfile

import keras
import numpy as np
import pytest

import tfdist
from tests import processes
from tests.data.formats.writing import write_image
from tfdist import evaluate, predict, train
from tfdist.checkpoint.format import TensorBlock, write_checkpoint
from tfdist.cli import trained_run, weights
from tfdist.config.train_config import TrainConfig
from tfdist.config.trained_config import EvaluateConfig, PredictConfig
from tfdist.coordination import LocalGroup
from tfdist.errors import InputError

DIGITS = tfdist.data.load("digits")


def images() -> np.ndarray:
    """Returns the test examples of digits, as a model gets them."""
    from tfdist.data import EvaluationPipeline

    return np.concatenate(
        [x for (x, _), *_ in EvaluationPipeline(DIGITS.test, 360).dataset([0], 1).as_numpy_iterator()]
    )


RUNS = {
    "run": {"checkpoint_every": "3"},  # with local BatchNorm, whose statistics differ between replicas
    "without_checkpoints": {},
    "averaged": {"ema": 0.9},
    # The weights of replicas differ from the center, which is evaluated.
    "elastic": {"checkpoint_every": "5", "sync": "easgd(period=2)"},
}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    return functools.cache(lambda name: trained(tmp_path_factory, **RUNS[name]))


@pytest.fixture(scope="module")
def run(run_of) -> str:
    return run_of("run")


def trained(tmp_path_factory, **flags) -> str:
    path = str(tmp_path_factory.mktemp("runs") / "run")
    options = {"strategy": "mirrored", "devices": 2, "model": "cnn(filters=(4,))", "steps": 5, "output_dir": path}
    assert not train.main(TrainConfig(**options | flags))
    return path


@pytest.fixture(scope="module")
def wanted(run) -> np.ndarray:
    return keras.models.load_model(f"{run}/model.keras", compile=False).predict(images(), verbose=0)


def only_train():
    return np.zeros([4, 8, 8, 1], "float32"), np.zeros([4], "int64")


def last_evaluation(run: str) -> dict[str, float]:
    with open(f"{run}/metrics.jsonl", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    return next(record for record in reversed(records) if record["kind"] == "eval")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *itertools.product(RUNS, [{}, {"strategy": "mirrored", "devices": 3, "batch_size": 50}]),
        ("elastic", {"strategy": "mirrored", "devices": 2}),
        ("elastic", {"strategy": "mesh", "devices": 2}),
    ],
)
def test_the_results_are_those_of_the_run(name, options, run_of, tmp_path, capsys):
    run, path = run_of(name), tmp_path / "new" / "results.json"
    assert evaluate.main(run, EvaluateConfig(output=str(path), **options)) == 0
    found = json.loads(path.read_text())
    record = last_evaluation(run)
    assert found.pop("results") == pytest.approx({key: record[key] for key in ("loss", "accuracy")}, rel=1e-5)
    source = "checkpoints/step-000000005" if name in ("run", "elastic") else "model.keras"
    assert found == {
        "checkpoint": f"{run}/{source}",
        "step": 5,
        "dataset": "digits, test",
        "examples": 360,
        "strategy": options.get("strategy", "single"),
        "replicas": 1 if options.get("strategy") == "mesh" else options.get("devices", 1),
    }
    assert capsys.readouterr().out.startswith(f"eval after 5 steps: loss {record['loss']:.4f}")


def test_the_best_checkpoint_is_the_one_that_the_newest_names(tmp_path):
    for step, values in ((3, {}), (6, {"best": ["val_loss", "min", 0.5, 3]})):
        parts = [TensorBlock.full("model/w", np.zeros(2, "float32"))]
        write_checkpoint(
            LocalGroup(), tmp_path / "checkpoints", parts, step=step, seed=0, flags={}, values=values, keep=9
        )
    assert [path.name for path in weights.weight_files(str(tmp_path), "best")] == ["step-000000003"]
    (tmp_path / "checkpoints" / "step-000000003").rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="kept its best checkpoint"):
        weights.weight_files(str(tmp_path), "best")


@pytest.mark.separable
@pytest.mark.smoke("evaluate")
def test_an_earlier_checkpoint_and_other_data(run, capsys):
    config = EvaluateConfig(checkpoint=f"{run}/checkpoints/step-000000003", dataset="synthetic:8x8x1", split="train")
    assert evaluate.main(run, config) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("eval after 3 steps: loss ")
    assert second.startswith(f"{run}/checkpoints/step-000000003  synthetic")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("predictions.npy", marks=[pytest.mark.separable, pytest.mark.smoke("predict")]),
        "predictions.npz",
        "predictions.csv",
    ],
)
def test_predictions_in_order(run, wanted, name, tmp_path, capsys):
    path = tmp_path / name
    assert predict.main(run, PredictConfig(output=str(path), strategy="mirrored", devices=3, batch_size=50)) == 0
    assert capsys.readouterr().out == f"{path}  [360, 10]  digits, test, from {run}/checkpoints/step-000000005\n"
    if name.endswith("csv"):
        rows = np.loadtxt(path, delimiter=",", skiprows=1)
        np.testing.assert_array_equal(rows[:, 0], range(360))
        found = rows[:, 1:]
        assert path.read_text().startswith("example,output_0,output_1,")
    else:
        loaded = np.load(path)
        found = loaded["predictions"] if name.endswith("npz") else loaded
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_images_without_classes_are_named(tmp_path_factory, tmp_path):
    for name, channel in (("a/0", 0), ("b/0", 1)):
        write_image(tmp_path / "classes" / f"{name}.png", channel, 0)
    for name in ("one, two", "three"):
        write_image(tmp_path / "new" / f"{name}.png", 1, 0)
    data = f"images:{tmp_path}/classes"
    path = trained(tmp_path_factory, dataset=data, model="mlp(hidden=(4,))", batch_size=2, steps=2)
    new, table, arrays = f"images:{tmp_path}/new(labels=False)", tmp_path / "new.csv", tmp_path / "new.npz"
    assert predict.main(path, PredictConfig(dataset=new, classes=True, output=str(table), strategy="single")) == 0
    lines = table.read_text().splitlines()
    assert lines[0] == "example,file,prediction"
    assert [line.rpartition(",")[0] for line in lines[1:]] == ['0,"one, two.png"', "1,three.png"]
    assert predict.main(path, PredictConfig(dataset=data, split="train", output=str(arrays), strategy="single")) == 0
    assert np.load(arrays)["files"].tolist() == ["a/0.png", "b/0.png"]


def test_classes_in_the_directory_of_the_run(run_of, capsys):
    run = run_of("without_checkpoints")
    assert predict.main(run, PredictConfig(classes=True)) == 0
    path = f"{run}/predictions-000000005.npy"
    assert capsys.readouterr().out.startswith(f"{path}  [360]  digits, test, from {run}/model.keras")
    model = keras.models.load_model(f"{run}/model.keras", compile=False)
    np.testing.assert_array_equal(np.load(path), model.predict(images(), verbose=0).argmax(-1))


def of_two_processes(command: str, run: str, *more: str) -> None:
    """Runs a command by two processes, with another strategy than the run's; only the first one reports."""
    outputs = processes.finish([sys.executable, "-m", f"tfdist.{command}", run, "--batch_size=50", *more], 2)
    assert [f"{run}/checkpoints/step-000000005" in output for output in outputs] == [True, False]


@pytest.mark.processes
def test_two_processes_predict(run, wanted, tmp_path):
    path = tmp_path / "predictions.npy"
    of_two_processes("predict", run, "--strategy=horovod", f"--output={path}")
    np.testing.assert_allclose(np.load(path), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("command", "config", "message"),
    [
        (evaluate, {"output": "/proc/new/a.json"}, "--output must be a writable path. Received: /proc/new/a.json"),
        (
            predict,
            {"classes": True, "dataset": f"{__name__}:only_train"},
            "--split=test needs a dataset with test examples.",
        ),
    ],
)
def test_what_is_refused(command, config, message, run):
    kind = {evaluate: EvaluateConfig, predict: PredictConfig}[command]
    with pytest.raises(InputError, match=message):
        command.main(run, kind(**config))


@pytest.mark.parametrize("module", ["keras_hub.models", "os", ["keras"]])
def test_modules_that_a_model_names_are_not_imported(module, tmp_path):
    with zipfile.ZipFile(tmp_path / "model.keras", "w") as archive:
        archive.writestr("config.json", json.dumps({"module": "keras", "config": [{"module": module}]}))
    with pytest.raises(ValueError, match="it names the module .*, which is imported only with --safe_mode=false"):
        trained_run._check_modules(tmp_path / "model.keras")


def test_code_that_a_run_names_is_not_run(run, tmp_path):
    """A run whose starts name a user's function; there is no checkpoint."""
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "model.keras").write_bytes(b"model")
    flags = ["--model=os:system(command='true')", "--dataset=digits", "--unknown=1"]
    (directory / "starts.jsonl").write_text(json.dumps({"step": 0, "flags": flags}) + "\n")
    with pytest.raises(
        InputError, match="called only with --safe_mode=false. Received: .*, which names --model=os:system"
    ):
        evaluate.main(str(directory), EvaluateConfig())
