"""Every example runs for a few steps, from another directory; flag files and cluster scripts are valid."""

import difflib
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

import keras
import numpy as np
import pytest
from absl import flags as absl_flags

from tests import jobs as processes
from tests import processes as forked
from tests.waiting import DEADLINE
from tfdist.cli import flags
from tfdist.cluster import environment
from tfdist.config import train_config
from tfdist.distribution.strategy_selection import choose_strategy
from tfdist.errors import ExitCode
from tfdist.launcher.job_controller import PREEMPTION_CODES

pytestmark = pytest.mark.processes

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FLAGFILES = sorted((EXAMPLES / "flagfiles").glob("*.flags"))

PROGRAMS = {
    "keras_plain.py": (["1"], r"loss [\d.]+  accuracy [\d.]+"),
    "keras_tfdist.py": (["1"], r"loss [\d.]+  accuracy [\d.]+"),
    "own_files.py": (["files"], r"digits digits-0-of-3.tfrecord .* digits.npz wine.csv"),
    "custom_loop.py": (["5"], r"step 5  loss [\d.]+  noise scale -?\d+ examples"),
    "notebook_spawn.py": (["1"], r"learning rate 0.1: accuracy on each rank \[([\d.]+), \1\]"),
}
OWN = {
    "own_strategy.py": (
        ["--strategy=own_strategy:Measured", "--model=mlp", "--steps=5"],
        r"all_reduce gradients/bucket0",
    ),
    "own_model_and_data.py": (
        ["--model=own_model_and_data:network(width=8)", "--dataset=own_model_and_data:tumors", "--steps=5"],
        r"eval after 5 steps: loss [\d.]+  accuracy [\d.]+",
    ),
    "rows_by_key.py": (
        ["--model=rows_by_key:network", "--dataset=rows_by_key:clicks(examples=500)", "--steps=5"],
        r"eval after 5 steps: loss [\d.]+  accuracy [\d.]+",
    ),
}


def run(arguments: list[str], directory: pathlib.Path, start: processes.Start = forked.start) -> str:
    """Runs Python in a directory; returns its output."""
    inherited = {
        name: v for name, v in environment.without_rank_variables(os.environ).items() if not name.startswith("TFDIST_")
    }
    with tempfile.TemporaryFile() as output:
        process = start([sys.executable, *arguments], inherited, output, str(directory))
        try:
            code = process.wait(DEADLINE)
        finally:
            process.kill()
        output.seek(0)
        text = output.read().decode()
    assert code == 0, text
    return text


def parsed(arguments: list[str]) -> train_config.TrainConfig:
    """Returns the configuration that `tfdist train` would parse."""
    values = absl_flags.FlagValues()
    flags.define(values)
    rest = values(["train", *arguments])[1:]
    assert not rest
    return flags.config(values)


def documents(name: str) -> list[dict]:
    """Returns the documents in a YAML file."""
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((EXAMPLES / name).read_text(encoding="utf-8")))


def test_every_python_example_is_run_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == PROGRAMS.keys() | OWN.keys()


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, tmp_path: pathlib.Path):
    arguments, expected = PROGRAMS[name]
    output = run([str(EXAMPLES / name), *arguments], tmp_path)
    assert re.search(expected, output), output


@pytest.mark.parametrize("name", OWN)
def test_what_is_named_in_a_flag(name: str, tmp_path: pathlib.Path):
    shutil.copy(EXAMPLES / name, tmp_path)
    arguments, expected = OWN[name]
    output = run(["-m", "tfdist.train", *arguments, "--output_dir=run"], tmp_path)
    assert re.search(expected, output), output


def test_few_lines_change_from_keras_to_tfdist():
    """Apart from indentation, the programs share the model, the optimizer, the loss and the data."""
    plain, ours = (
        [
            line.strip()
            for line in (EXAMPLES / name).read_text(encoding="utf-8").partition("\n\nx, y = ")[2].splitlines()
        ]
        for name in ("keras_plain.py", "keras_tfdist.py")
    )
    changes = [line for line in difflib.ndiff(plain, ours) if line[:2] in ("+ ", "- ") and line[2:]]
    assert len([line for line in changes if line[0] == "-"]) <= 5, changes
    assert len([line for line in changes if line[0] == "+"]) <= 11, changes


def history(output: str) -> dict[str, list[float]]:
    """Returns the training history that a program has printed, on rank 0 if there are several."""
    return json.loads(re.findall(r"^(?:\[0\] )?(\{.*\})$", output, re.MULTILINE)[-1])


def test_the_tutorial_for_several_workers_takes_one_line(tmp_path: pathlib.Path):
    """On two workers its history equals that of one process with the global batch and no strategy.

    tests/traps/keras_fit_test.py shows that it fails without the line.
    """
    before, after = (EXAMPLES / "migration" / f"tf_distribute_{name}.py" for name in ("before", "after"))
    first, second = (path.read_text(encoding="utf-8").partition('"""\n\n')[2].splitlines() for path in (before, after))
    changes = [line for line in difflib.ndiff(first, second) if line[:2] in ("+ ", "- ") and line[2:]]
    assert changes == ["+ import tfdist", "+ model = tfdist.distribute(model)"]
    plain = tmp_path / "plain.py"
    text = before.read_text(encoding="utf-8").replace("with strategy.scope():", "if True:")
    plain.write_text(text.replace("strategy = tf.distribute.MultiWorkerMirroredStrategy()\n", ""), encoding="utf-8")
    launch = ["-m", "tfdist.launch", "--processes=2", "--", sys.executable]
    ours, expected = history(run([*launch, str(after), "2"], tmp_path)), history(run([str(plain), "2"], tmp_path))
    assert ours == {name: pytest.approx(values, rel=1e-5) for name, values in expected.items()}


def test_the_run_of_make_train_is_the_flagfiles_and_learns(tmp_path: pathlib.Path):
    """README.md promises the result: at least 97% of the test images."""
    path = EXAMPLES / "flagfiles" / "digits_mirrored.flags"
    (shown,) = re.findall(r"^TRAIN_FLAGS \?= (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert parsed(shlex.split(shown)) == parsed([f"--flagfile={path}"])
    output = run(["-m", "tfdist.train", f"--flagfile={path}", "--output_dir=run"], tmp_path)
    (accuracy,) = re.findall(r"^eval after 450 steps: loss .*  accuracy ([\d.]+)$", output, re.MULTILINE)
    assert float(accuracy) >= 0.97, output


def test_the_run_of_the_mesh_shows_nothing_but_the_run(tmp_path: pathlib.Path):
    """TensorFlow's C++ code writes "Incompatible Matrix dimensions" to stderr if its memory optimizer runs."""
    path = EXAMPLES / "flagfiles" / "mesh.flags"
    smaller = ["--model=transformer(layers=1,width=16,heads=2)", "--dataset=text(length=16)", "--steps=1"]
    output = run(["-m", "tfdist.train", f"--flagfile={path}", *smaller, "--output_dir=run"], tmp_path, processes.start)
    described = r"^(model|data|strategy|chosen|batch|length|output) +\S|^(next: tfdist|model\.keras, .* are in$)"
    took = r"(Loading TensorFlow|compiling the training step) took |trained to step 1 in "
    shown = rf"{described}|{took}|^step 1/1 |^run ended: done|^eval after 1 steps: |^run$"
    assert [line for line in output.splitlines() if not re.search(shown, line)] == []


@pytest.mark.full
def test_a_mesh_over_two_processes_leaves_one_model(tmp_path: pathlib.Path):
    path = EXAMPLES / "flagfiles" / "mesh.flags"
    smaller = ["--model=transformer(layers=1,width=16,heads=2)", "--dataset=text(length=16)", "--steps=3"]
    train = [sys.executable, "-m", "tfdist.train", f"--flagfile={path}", *smaller, "--output_dir=run"]
    output = run(["-m", "tfdist.launch", "--processes=2", "--", *train], tmp_path)
    assert re.search(r"eval after 3 steps: loss [\d.]+", output), output
    model = keras.models.load_model(tmp_path / "run" / "model.keras")
    assert model.predict(np.zeros([2, 16], "int32"), verbose=0).shape == (2, 16, 256)


@pytest.mark.parametrize("path", FLAGFILES, ids=lambda path: path.name)
def test_flagfile(path: pathlib.Path):
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    known = {field for field in parsed([]).__dataclass_fields__}
    assert {re.match(r"--(\w+)=", line)[1] for line in lines} <= known  # type: ignore[index]  # None fails too
    found = parsed([f"--flagfile={path}"])
    assert found.batch_size and (found.steps or found.epochs)


@pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.PEER_LOST, *sorted(PREEMPTION_CODES), 137])
def test_the_sbatch_script_queues_the_job_again_when_it_was_preempted(code: int, tmp_path: pathlib.Path):
    """With fake Slurm programs that record how they were called."""
    for name, end in (("srun", code), ("scontrol", ExitCode.DONE)):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >"$0.called"\nexit {int(end)}\n', encoding="utf-8")
        program.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    script = ["bash", str(EXAMPLES / "cluster" / "slurm.sbatch")]
    assert subprocess.run(script, env=variables, timeout=300).returncode == code
    called = (tmp_path / "srun.called").read_text(encoding="utf-8").splitlines()
    trained = parsed(called[called.index("tfdist.train") + 1 :])
    assert (trained.strategy, trained.checkpoint_every, trained.output_dir) == ("multiworker", "600s", "runs/7")
    again = tmp_path / "scontrol.called"
    assert again.exists() == (code in PREEMPTION_CODES)
    assert not again.exists() or again.read_text(encoding="utf-8").split() == ["requeue", "7"]


def test_the_kubernetes_job_makes_a_cluster_and_goes_on_when_it_was_preempted():
    """The manifest sets what the process reads, in every pod."""
    service, policy, job = documents("cluster/kubernetes-job.yaml")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][:3] == ["python", "-m", "tfdist.train"]
    trained = parsed(container["command"][3:])
    given = {variable["name"]: variable.get("value", "secret") for variable in container["env"]}
    for index in range(spec["completions"]):
        found = choose_strategy(given | {"JOB_COMPLETION_INDEX": str(index)}, trained.strategy).cluster
        assert (found.rank, found.size, found.source) == (index, spec["completions"], "Kubernetes")
        assert found.coordinator.startswith(f"{job['metadata']['name']}-0.{pod['subdomain']}:")
    assert spec["parallelism"] == spec["completions"] and spec["completionMode"] == "Indexed"
    assert pod["setHostnameAsFQDN"] and pod["subdomain"] == service["metadata"]["name"]
    label = spec["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == policy["spec"]["podSelector"]["matchLabels"] == label
    (volume,), (mount,) = pod["volumes"], container["volumeMounts"]
    assert trained.checkpoint_every != "0" and trained.output_dir.startswith(mount["mountPath"])
    assert volume["name"] == mount["name"] and "persistentVolumeClaim" in volume
    assert pod["shareProcessNamespace"]  # otherwise SIGTERM would not end process 1 with code 143
    assert pod["restartPolicy"] == "Never"  # required by Kubernetes for a podFailurePolicy
    rules = [rule for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert [(rule["action"], rule["onExitCodes"]["values"]) for rule in rules] == [
        ("Ignore", sorted(PREEMPTION_CODES)),
        ("FailJob", [ExitCode.BAD_INPUT, ExitCode.NOT_FINITE]),
    ]
