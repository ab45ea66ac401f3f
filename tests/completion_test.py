"""Completion by Tab, in real shells."""

import os
import pathlib
import pty
import re
import select
import shutil
import subprocess
import sys
import time

import pytest

from tfdist.__main__ import commands

pytestmark = pytest.mark.processes

_CALL = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_tfdist
printf '%s\\n' "${COMPREPLY[@]}"
"""
DEADLINE = 300.0
QUIET = 0.3  # seconds without output, after which a shell waits for a key
_TRAINING = ("--model=", "--batch_size=", "--jit_compile", "--flagfile=", "--config=", "--help")


def script(shell: str, folder: pathlib.Path) -> pathlib.Path:
    """Writes the script for a shell."""
    path = folder / f"completion.{shell}"
    command = [sys.executable, "-m", "tfdist", "completion", shell]
    with path.open("w") as file:
        subprocess.run(command, stdout=file, check=True, timeout=300)
    return path


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The script for bash."""
    return script("bash", tmp_path_factory.mktemp("bash"))


def offered(path: pathlib.Path, *words: str, directory: pathlib.Path | None = None) -> list[str]:
    """Returns what bash offers for the last of some words, into which bash has split a line."""
    done = subprocess.run(
        ["bash", "--norc", "-c", _CALL, "bash", path, *words],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert not done.stderr
    return done.stdout.split()


@pytest.mark.smoke("completion")
def test_completes_commands(bash: pathlib.Path):
    assert offered(bash, "tfdist", "") == [*commands(), "help", "--help", "--version"]
    assert offered(bash, "tfdist", "tr") == ["train"]
    assert offered(bash, "/usr/bin/tfdist", "help", "la") == ["launch", "layout"]
    assert offered(bash, "tfdist", "completion", "") == ["bash", "zsh"]
    assert offered(bash, "tfdist", "bench", "") == ["collectives"]


def test_completes_flags(bash: pathlib.Path):
    assert {*_TRAINING} <= {*offered(bash, "tfdist", "train", "")}
    assert offered(bash, "tfdist", "train", "--batch_s") == ["--batch_size="]
    assert offered(bash, "tfdist", "train", "--steps=3", "--prec") == ["--precision="]
    assert offered(bash, "tfdist", "verify", "--flo") == ["--float64"]
    assert offered(bash, "tfdist", "bench", "collectives", "--oper") == ["--operations="]
    assert offered(bash, "tfdist", "ledger", "--") == ["--json", "--flagfile=", "--config=", "--help"]
    assert offered(bash, "tfdist", "completion", "--") == ["--help"]
    assert "--nojit_compile" not in offered(bash, "tfdist", "train", "--")
    assert offered(bash, "tfdist", "train", "--nojit") == ["--nojit_compile"]


def test_flags_without_effect_are_not_offered(bash: pathlib.Path):
    assert offered(bash, "tfdist", "train", "--checkpoint_e") == ["--checkpoint_every="]
    assert offered(bash, "tfdist", "verify", "--checkpoint_e") == []


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (("train", "--precision", "="), ["float32", "mixed_bfloat16", "mixed_float16"]),
        (("train", "--precision", "=", "mixed_b"), ["mixed_bfloat16"]),
        (("train", "--precision", "mixed_b"), ["mixed_bfloat16"]),
        (("train", "--precision=mixed_b"), ["--precision=mixed_bfloat16"]),  # = is not in COMP_WORDBREAKS
        (("train", "--strategy", "=", "mir"), ["mirrored"]),
        (("layout", "--strategy", "="), ["auto", "mesh", "pipeline", "multiworker", "horovod", "parameter_server"]),
        (("train", "--model", "=", "res"), ["resnet50"]),
        (("export", "--format", "=", "k"), ["keras"]),
        (("launch", "--launcher", "=", "h"), ["horovod"]),
        (("train", "--steps", "="), []),
    ],
)
def test_completes_values(bash: pathlib.Path, words: tuple[str, ...], values: list[str]):
    assert offered(bash, "tfdist", *words) == values


def test_completes_paths(bash: pathlib.Path, tmp_path: pathlib.Path):
    (tmp_path / "runs one").mkdir()
    (tmp_path / "run.yaml").touch()
    assert offered(bash, "tfdist", "train", "--config", "=", "run.", directory=tmp_path) == ["run.yaml"]
    assert offered(bash, "tfdist", "train", "--output_dir", "=", "ru", directory=tmp_path) == ["runs", "one"]
    assert offered(bash, "tfdist", "ledger", "ru", directory=tmp_path) == []  # left to bash, which offers paths


def test_completes_the_command_of_a_launcher(bash: pathlib.Path):
    launch = ("tfdist", "launch", "--processes", "=", "2", "--")
    assert "bash" in offered(bash, *launch, "bas")
    assert offered(bash, *launch, "tfdist", "tr") == ["train"]
    assert offered(bash, *launch, "tfdist", "train", "--batch_s") == ["--batch_size="]
    assert offered(bash, *launch, "tfdist", "train", "--strategy", "=", "hor") == ["horovod"]
    assert offered(bash, *launch, "mine", "--st") == []
    assert offered(bash, "tfdist", "train", "--output_dir", "=", "tfdist", "--prec") == ["--precision="]


def typed(command: list[str], keys: list[str], expected: str, environment: dict[str, str]) -> str:
    """Types keys in an interactive shell, until the expected text appears; returns what was shown and not deleted again."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(command[0], command, environment)
    shown, remaining = "", [*keys]
    end = quiet = time.monotonic()
    try:
        while expected not in shown and time.monotonic() < end + DEADLINE:
            if select.select([terminal], [], [], 0.1)[0]:
                shown = re.sub(r"[^\x08]\x08", "", shown + os.read(terminal, 65536).decode(errors="replace"))
                quiet = time.monotonic()
            elif remaining and time.monotonic() > quiet + QUIET and shown:
                os.write(terminal, remaining.pop(0).encode())
                quiet = time.monotonic()
        return shown
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(terminal)


def test_in_an_interactive_bash(bash: pathlib.Path):
    line = "tfdist train --strategy=mirr\t --prec\tmixed_b\t --batch_s\t8"
    shown = typed(
        ["bash", "--norc", "-i"],
        [f"source {bash}\n", line],
        "--strategy=mirrored  --precision=mixed_bfloat16  --batch_size=8",
        os.environ | {"TERM": "dumb", "PS1": "$ ", "COLUMNS": "200"},
    )
    assert "--strategy=mirrored  --precision=mixed_bfloat16  --batch_size=8" in shown, shown


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_in_an_interactive_zsh(tmp_path: pathlib.Path):
    start = f"autoload -Uz compinit && compinit -u -d {tmp_path}/dump; source {script('zsh', tmp_path)}\n"
    expected = "tfdist train --strategy=mirrored --precision=mixed_bfloat16 --batch_size=8"
    shown = typed(
        ["zsh", "-f", "-i"],
        [start, "tfdist tra\t", "--strategy=mirr\t", "--prec\t", "mixed_b\t", "--batch_s\t", "8"],
        expected,
        os.environ | {"TERM": "dumb", "PS1": "$ ", "COLUMNS": "200", "HOME": str(tmp_path)},
    )
    assert expected in shown, shown
