"""`tfdist run`: an unchanged script on replicas and processes, with its arguments and its exit code."""

import ast
import contextlib
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.user_commands import run_as_user
from tfdist import keras_fit
from tfdist.run import run_script

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
    return run_as_user([sys.executable, *arguments], directory, **variables)


@pytest.fixture
def script(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return str(path)


def printed(done: subprocess.CompletedProcess) -> list:
    """Returns the last line of the script on each rank."""
    return [json.loads(line) for line in re.findall(r"^(?:\[\d\] )?(\[.*\]\])$", done.stdout, re.MULTILINE)]


def test_a_script_gives_the_same_on_one_and_on_several(script: str, tmp_path: pathlib.Path) -> None:
    """It gets its arguments, and its exit code is the command's; only one process shows progress."""
    single = run(["-m", "tfdist.run", "--seed=7", script, "9", "--flag=x"], tmp_path)
    assert single.returncode == 9, single.stdout
    [(history, evaluated, predicted, arguments)] = printed(single)
    assert arguments == ["9", "--flag=x"]
    launch = ["-m", "tfdist.launch", "--processes=2", "--launcher=horovod", "--", sys.executable]
    several = run([*launch, "-m", "tfdist.run", "--seed=7", script, "0", "--flag=x"], tmp_path)
    assert several.returncode == 0, several.stdout
    assert len(printed(several)) == 2 and several.stdout.count("Epoch 2/2") == 1, several.stdout
    for found in printed(several):
        assert {name: pytest.approx(values, rel=1e-5) for name, values in history.items()} == found[0]
        assert found[1] == pytest.approx(evaluated, rel=1e-5) and found[2] == pytest.approx(predicted, rel=1e-4)


@pytest.mark.smoke("run")
def test_a_mistake_in_a_script_is_one_line_with_the_place(tmp_path: pathlib.Path) -> None:
    """It names arguments, which the script can change, and not flags."""
    (tmp_path / "own.py").write_text("import tfdist\n\ntfdist.load_strategy('mirrored', devices=-1)\n")
    done = run(["-m", "tfdist.run", "own.py"], tmp_path)
    assert done.returncode == 2, done.stdout
    [line] = done.stdout.splitlines()
    assert line.startswith("tfdist run: own.py, line 3: devices must be"), line


def test_the_hook_of_a_script_gets_errors_that_are_not_those_of_tfdist(tmp_path: pathlib.Path) -> None:
    """As under `python own.py`."""
    hook = "import sys\nsys.excepthook = lambda kind, error, trace: print(kind.__name__, error, trace is error.__traceback__)\n"
    (tmp_path / "own.py").write_text(f"{hook}raise ValueError('wrong')\n")
    done = run(["-m", "tfdist.run", "own.py"], tmp_path)
    assert (done.returncode, done.stdout) == (1, "ValueError wrong True\n")


@pytest.fixture
def run_program(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Runs a program in this process, as the command does, by a symbolic link from another directory."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "links").mkdir()

    def run_it(text: str) -> None:
        (tmp_path / "own.py").write_text(text)
        (tmp_path / "links" / "own.py").symlink_to(tmp_path / "own.py")
        run_script(str(tmp_path / "links" / "own.py"), [])

    return run_it


@pytest.mark.parametrize("code", ["", "0", "None", "False", "''", "[]", "1", "'wrong'"])
def test_only_a_failure_is_an_exit(code: str, run_program: Callable[[str], None]) -> None:
    is_failure = code not in ("", "0", "None", "False")
    with pytest.raises(SystemExit) if is_failure else contextlib.nullcontext():
        run_program(f"import sys; sys.exit({code})")


def test_a_scripts_neighbors_are_those_of_the_file_that_a_link_is_to(run_program, tmp_path: pathlib.Path) -> None:
    (tmp_path / "neighbor_of_own.py").write_text("")
    run_program("import neighbor_of_own")


def test_a_script_may_close_its_standard_output_and_leave_a_pool_of_processes(tmp_path: pathlib.Path) -> None:
    (tmp_path / "own.py").write_text(
        "import concurrent.futures, sys\n"
        "pool = concurrent.futures.ProcessPoolExecutor(1)\n"
        "with open('log', 'w') as file:\n"
        "    sys.stdout = file\n"
        "    print(pool.submit(int, '3').result())\n"
    )
    done = run(["-m", "tfdist.run", "own.py"], tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert (tmp_path / "log").read_text() == "3\n"


def test_what_is_replaced_is_in_the_documents_table(tmp_path: pathlib.Path) -> None:
    """The names are those that the public classes of Keras have otherwise after all patches than before."""
    table = re.findall(
        r"^\| `(keras\.[\w.]+)`", (ROOT / "docs" / "guides" / "keras_fit.md").read_text("utf-8"), re.MULTILINE
    )
    assert sorted(table) == sorted(keras_fit.PATCHED_NAMES)
    done = run(["-c", PATCHES], tmp_path)
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout.splitlines()[-1]) == sorted(keras_fit.PATCHED_NAMES)


# Runs what patches Keras, and prints the names that have changed; an inherited name is that of the public base class.
PATCHES = """
import inspect, json
import keras, numpy as np

def names():
    modules = [keras, *(m for name, m in vars(keras).items() if inspect.ismodule(m) and name not in ("_tf_keras", "src"))]
    kinds = {}
    for module in modules:
        for name, kind in vars(module).items():
            if inspect.isclass(kind) and kind.__module__.startswith("keras."):
                title = f"{module.__name__}.{name}"
                kinds[kind] = min(kinds.get(kind, title), title, key=len)
    return kinds, {(kind, name): inspect.getattr_static(kind, name) for kind in kinds for name in dir(kind)}

kinds, before = names()
import tfdist, tfdist.horovod
from tfdist.horovod.optimizer import patch_keras
strategy = tfdist.load_strategy("mesh", mesh_shape="data:2")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
tfdist.distribute(model, strategy).fit(np.zeros((4, 4)), np.zeros((4, 2)), batch_size=4, verbose=0)
patch_keras()
_, after = names()
changed = {key for key, value in after.items() if before.get(key) is not value}
public = [
    f"{kinds[kind]}.{name}"
    for kind, name in changed
    if not any((base, name) in changed and after[base, name] is after[kind, name] for base in kind.__mro__[1:])
    and (not name.startswith("_") or name.endswith("__"))
    and (callable(after[kind, name]) or isinstance(after[kind, name], property))
]
print(json.dumps(sorted(public)))
"""
# Modules that assign to attributes of Keras or to attributes whose names they compute, with the reason.
ASSIGN = {
    "keras_fit/patches.py": "the table",
    "step/metrics.py": "in the table",
    "horovod/module_aliases.py": "in the table",
    "horovod/optimizer.py": "in the table",
    "horovod/wrapped_optimizer.py": "attributes of an optimizer that it has made",
    "keras_internals/fitting.py": "the state of callbacks, and private functions, while a step is labelled",
    "keras_internals/layers.py": "in the table, private names, functions of tf.random, and attention layers of meshes",
    "keras_internals/patching.py": "what the other modules pass to it, until the end of a context",
    "keras_internals/models.py": "private functions, and whether weights are collected in memory, while a model is saved",
    "keras_internals/optimizers.py": "private methods",
    "keras_internals/tf_internals.py": "variables of tf.distribute",
    "keras_internals/variables.py": "in the table, private functions, and the creation of weights in the scope of a pipeline",
    "pipelining/staged_model.py": "methods of a pipeline's model, which compute with all weights",
}


def assignments(tree: ast.Module) -> list[str]:
    """Returns the calls of `setattr` for other than self, and the assigned attributes of Keras's modules and classes."""
    of_keras = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{getattr(node, 'module', '')}."
            of_keras |= {
                a.asname or a.name for a in node.names if f"{module}{a.name}.".lstrip(".").startswith("keras.")
            }
    targets = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    found = [ast.unparse(n) for n in targets if ast.unparse(n).partition(".")[0] in of_keras]
    calls = (ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Call))
    return found + [call for call in calls if call.startswith("setattr(") and not call.startswith("setattr(self, ")]


def test_nothing_else_of_keras_is_assigned() -> None:
    """No other module of the library assigns to attributes of Keras, and each of these does."""
    found = {
        path.relative_to(ROOT).as_posix(): assigned
        for folder in ("tfdist", "strategies")
        for path in (ROOT / folder).rglob("*.py")
        if (assigned := assignments(ast.parse(path.read_text("utf-8"))))
    }
    assert found.keys() == {f"tfdist/{name}" for name in ASSIGN}, found
