"""The examples at the end of each command's help: they are shown, and they run."""

import json
import os
import pathlib
import shlex
import shutil
import sys

import pytest

from tests.user_commands import captured, run_as_user
from tfdist.__main__ import commands

pytestmark = pytest.mark.processes

ROOT = pathlib.Path(__file__).parents[2]
OF_A_RUN = ("checkpoints", "export", "ledger")  # that the first example of `train` makes


def described(command: str) -> dict:
    return json.loads(captured([sys.executable, "-m", f"tfdist.{command}", "--helpjson"], check=True).stdout)


@pytest.fixture(scope="module")
def examples() -> dict[str, list[str]]:
    return {command: described(command)["examples"] for command in commands()}


def test_each_command_has_two(examples: dict[str, list[str]]):
    assert not [command for command, lines in examples.items() if len(lines) != 2]


def run(line: str, directory: pathlib.Path) -> str:
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    done = run_as_user(["bash", "-c", line], directory, PATH=path)
    assert done.returncode == 0, f"{line}\n{done.stdout}"
    return done.stdout


@pytest.mark.full
def test_all_work(examples: dict[str, list[str]], tmp_path: pathlib.Path):
    shutil.copy(ROOT / "examples" / "keras_plain.py", tmp_path / "script.py")
    first = [command for command in examples if command not in OF_A_RUN]
    for command in (*sorted(first, key=lambda name: name != "train"), *OF_A_RUN):
        for line in examples[command]:
            run(line.replace("~", str(tmp_path)), tmp_path)
    assert {"proved.keras", "served"} <= {path.name for path in tmp_path.iterdir()}
    assert shlex.split(examples["run"][0])[-1] == "script.py"
