"""`python -m tfdist.run`: an unchanged script on replicas and processes, with its arguments and its exit code."""

import ast
import json
import operator
import os
import pathlib
import re
import subprocess
import sys

import keras
import pytest

from tfdist import keras_fit
from tfdist.cluster import environment

pytestmark = pytest.mark.processes

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = """
import json, sys, keras, numpy as np
x, y = np.random.normal(size=(40, 6)).astype("float32"), np.random.randint(0, 3, 40)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("adam", loss, metrics=["accuracy"])
history = model.fit(x, y, batch_size=8, epochs=2, validation_split=0.2, verbose=2).history
print(json.dumps([history, model.evaluate(x, y, verbose=0), float(model.predict(x, verbose=0).sum()), sys.argv[1:]]))
sys.exit(int(sys.argv[1]))
"""


def run(arguments: list[str], directory: pathlib.Path, **variables: str) -> subprocess.CompletedProcess:
    inherited = {
        name: v for name, v in environment.without_sources(os.environ).items() if not name.startswith("TFDIST_")
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=inherited | {"TF_CPP_MIN_LOG_LEVEL": "2"} | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
    )


@pytest.fixture
def script(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return str(path)


def printed(done: subprocess.CompletedProcess) -> list:
    """Returns the last line of the script on each rank."""
    return [json.loads(line) for line in re.findall(r"^(?:\[\d\] )?(\[.*\]\])$", done.stdout, re.MULTILINE)]


def test_a_script_gives_the_same_on_one_and_on_several(script: str, tmp_path: pathlib.Path) -> None:
    """It gets its arguments; only one process shows progress."""
    single = run(["-m", "tfdist.run", "--seed=7", script, "0", "--flag=x"], tmp_path)
    [(history, evaluated, predicted, arguments)] = printed(single)
    assert arguments == ["0", "--flag=x"]
    launch = ["-m", "tfdist.launch", "--processes=2", "--launcher=horovod", "--", sys.executable]
    several = run([*launch, "-m", "tfdist.run", "--seed=7", script, "0", "--flag=x"], tmp_path)
    assert several.returncode == 0, several.stdout
    assert len(printed(several)) == 2 and several.stdout.count("Epoch 2/2") == 1, several.stdout
    for found in printed(several):
        assert {name: pytest.approx(values, rel=1e-5) for name, values in history.items()} == found[0]
        assert found[1] == pytest.approx(evaluated, rel=1e-5) and found[2] == pytest.approx(predicted, rel=1e-4)


def test_a_script_s_exit_code_is_the_command_s(script: str, tmp_path: pathlib.Path) -> None:
    done = run(["-m", "tfdist.run", "--strategy=mirrored", "--devices=2", script, "9"], tmp_path)
    assert done.returncode == 9, done.stdout
    assert printed(done)


def test_flags_come_from_the_environment_too(script: str, tmp_path: pathlib.Path) -> None:
    """Flags of the command line take precedence; errors are one line."""
    done = run(["-m", "tfdist.run", script, "0"], tmp_path, TFDIST_FLAGS="--clip_norm=much")
    assert done.returncode == 2 and "--clip_norm" in done.stdout.splitlines()[-1], done.stdout
    done = run(["-m", "tfdist.run", "--clip_norm=1", script, "0"], tmp_path, TFDIST_FLAGS="--clip_value=1")
    assert done.returncode == 2
    assert "tfdist.run: Gradients are clipped by their norm or by value" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ("The script must follow the flags",)),
        (["nowhere.py"], ("The script must be a file. Received: nowhere.py.",)),
        (["--strategy=mesh", "script.py"], ("Keras's own fit runs on single", "--strategy=mesh")),
        (["--compresion=fp16", "script.py"], ("--compresion is not a flag of tfdist.run", '"--compression"')),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], parts: tuple[str, ...], script: str, tmp_path: pathlib.Path
) -> None:
    done = run(["-m", "tfdist.run", *arguments], tmp_path)
    assert done.returncode == 2
    [line] = done.stdout.splitlines()
    assert all(part in line for part in parts), line


def test_what_is_replaced_is_public_and_in_the_documents_table() -> None:
    table = re.findall(r"^\| `(keras\.[\w.]+)`", (ROOT / "docs" / "keras_fit.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(table) == sorted(keras_fit.REPLACED)
    for name in keras_fit.REPLACED:
        kind, _, attribute = name.removeprefix("keras.").partition(".")
        assert not attribute.startswith("_") or attribute == "__call__"
        owner = {"Optimizer": keras.optimizers.Optimizer, "Model": keras.Model, "metrics": keras.metrics}[kind]
        assert operator.attrgetter(attribute)(owner)


def test_nothing_else_of_keras_is_assigned() -> None:
    """No code outside the table assigns to attributes of Keras."""
    for path in sorted((ROOT / "tfdist" / "keras_fit").glob("*.py")):
        calls = [n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Call)]
        setters = [ast.unparse(call) for call in calls if ast.unparse(call.func) == "setattr"]
        assert not setters or path.name == "patches.py", (path, setters)
