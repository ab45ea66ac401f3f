"""The executable `tfdist`, and `python -m tfdist`, which is the same."""

import os
import pathlib
import subprocess
import sys

import pytest

import tfdist
from tests.user_commands import captured
from tfdist import __main__ as main
from tfdist.__main__ import commands

pytestmark = pytest.mark.processes

EXECUTABLE = str(pathlib.Path(sys.executable).parent / "tfdist")
PACKAGE = (sys.executable, "-m", "tfdist")


def run(*command: str, directory: pathlib.Path | None = None) -> tuple[int, str, str]:
    """Runs a command; returns its exit code, output and errors."""
    done = captured(command, cwd=directory)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("arguments", [(), ("help",), ("--help",), ("-h",)])
@pytest.mark.parametrize("program", [(EXECUTABLE,), PACKAGE], ids=["tfdist", "-m"])
def test_lists_the_commands(program: tuple[str, ...], arguments: tuple[str, ...]):
    code, out, err = run(*program, *arguments)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "Usage: tfdist COMMAND [--flag=value ...]"
    assert [tuple(line.split(maxsplit=1)) for line in lines if line.startswith("  ")] == list(commands().items())
    assert "  install_horovod  Build Horovod for the installed TensorFlow, and install it." in lines


@pytest.mark.parametrize(
    "arguments", [("--help",), ("--bach_size=3",), ("--steps=1", "--epochs=2"), ("--steps",), ("x",)]
)
def test_a_command_is_its_module(arguments: tuple[str, ...]):
    expected = run(sys.executable, "-m", "tfdist.train", *arguments)
    assert run(EXECUTABLE, "train", *arguments) == expected
    assert run(*PACKAGE, "train", *arguments) == expected


def test_the_module_is_main_and_imports_from_the_current_directory(tmp_path: pathlib.Path):
    """Shown by a module of the name that `train` imports first."""
    (tmp_path / "keras.py").write_text(
        "import sys\nprint(sys.modules['__main__'].__spec__.name, sys.argv[0][-9:], sys.argv[1:])\nraise SystemExit(7)"
    )
    for program in ((sys.executable, "-m", "tfdist.train"), (EXECUTABLE, "train"), (*PACKAGE, "train")):
        assert run(*program, "--steps=3", directory=tmp_path) == (7, "tfdist.train /train.py ['--steps=3']\n", "")


def test_versions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    found = {"tensorflow": "2.21.0", "keras": "3.15.1"}

    def version(name: str) -> str:
        if name not in found:
            raise main.importlib.metadata.PackageNotFoundError
        return found[name]

    monkeypatch.setattr(main.importlib.metadata, "version", version)
    assert main.main(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [lines[0], *lines[2:]] == [
        f"tfdist {tfdist.__version__}",
        "TensorFlow 2.21.0",
        "Keras 3.15.1",
        "Horovod is not installed",
    ]


@pytest.mark.parametrize("arguments", [(), ("--version",), ("help", "train")])
def test_imports_no_tensorflow(arguments: tuple[str, ...]):
    code = (
        "import sys\nfrom tfdist.__main__ import main\narguments = sys.argv[1:]\ntry:\n  code = main(arguments)\n"
        "except SystemExit as end:\n  code = end.code\nassert not code\n"
        "assert not {'tensorflow', 'keras', 'horovod', 'tfdist.install_horovod'} & set(sys.modules)\n"
        "assert 'train' in arguments or 'absl' not in sys.modules"
    )
    assert run(sys.executable, "-c", code, *arguments)[::2] == (0, "")


def test_a_reader_that_is_gone_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(PACKAGE, stdout=writer, stderr=subprocess.PIPE) as process:
        os.close(writer)
        assert (process.communicate(timeout=300)[1], process.returncode) == (b"", 0)
