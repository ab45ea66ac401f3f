"""The installer's messages, and when it changes nothing; without network and compiler."""

import pathlib
import subprocess
import sys

import pytest

from tfdist import install_horovod
from tfdist.cli import command
from tfdist.errors import ExitCode, TfdistError


def run(*arguments: str) -> int:
    """Runs the command as from a shell."""
    return command.run("install_horovod", install_horovod.define_flags, install_horovod.main, ["program", *arguments])


@pytest.fixture
def no_tools(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an empty PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("CXX", raising=False)


def test_a_failed_pip_is_one_line_with_the_cause_and_the_log(tmp_path: pathlib.Path):
    log = install_horovod.Log(tmp_path / "install.log")
    with pytest.raises(
        TfdistError, match=r"^`pip no-such-command` failed: ERROR: unknown command .*\(log: .*install.log\)$"
    ):
        log.pip("no-such-command")
    assert log.path.read_text().startswith(f"$ {sys.executable}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no_such_flag"], "--no_such_flag is not a flag of tfdist.install_horovod."),
        (["--gpu=maybe"], "flag --gpu=maybe"),
        (["now"], 'Only flags are accepted, written --name=value. Received: "now".'),
    ],
)
def test_bad_arguments_end_with_one_line_and_code_2(arguments, message, capsys):
    assert run(*arguments) == ExitCode.BAD_INPUT
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_help_lists_the_flags(capsys):
    assert run("--help") == ExitCode.DONE
    out = capsys.readouterr().out
    assert all(flag in out for flag in ("gpu", "mpi", "force", "cache_dir"))


def test_a_missing_tool_ends_the_command_with_code_2(no_tools, tmp_path, capsys):
    code = run("--force", f"--cache_dir={tmp_path / 'cache'}")
    assert code == ExitCode.BAD_INPUT
    assert capsys.readouterr().err == (
        "tfdist.install_horovod: Horovod's build needs g++. Received: none. Install the Debian package g++.\n"
    )


def test_an_unwritable_cache_is_bad_input(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert run("--force", f"--cache_dir={tmp_path / 'file'}") == ExitCode.BAD_INPUT
    assert "The cache must be writable." in capsys.readouterr().err


@pytest.mark.parametrize("variables", [{"XDG_CACHE_HOME": "/xdg"}, {}])
def test_the_cache_is_where_the_user_keeps_caches(variables, monkeypatch, capsys):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run("--help")
    assert f"{variables.get('XDG_CACHE_HOME', '~/.cache')}/tfdist/horovod" in capsys.readouterr().out


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Fakes the output of the probe of the installed Horovod."""
    answer = {"stdout": '["0.28.1+tfdist.4", "2.21.0", ["Gloo"]]', "stderr": "", "code": "0"}

    def run_probe(command, **_):
        assert "horovod.tensorflow" in command[-1]
        return subprocess.CompletedProcess(command, int(answer["code"]), answer["stdout"], answer["stderr"])

    monkeypatch.setattr(install_horovod.subprocess, "run", run_probe)
    monkeypatch.setattr(install_horovod.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(install_horovod.importlib.metadata, "version", lambda name: "2.21.0")
    return answer


def test_a_horovod_that_works_is_left_alone(probed, tmp_path, capsys):
    assert run(f"--cache_dir={tmp_path}") == ExitCode.DONE
    assert capsys.readouterr().out == "Horovod 0.28.1+tfdist.4 (Gloo) works with TensorFlow 2.21.0. Nothing to do.\n"
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("answer", "flags", "reason"),
    [
        ({"stdout": '["0.28.1+tfdist.4", "2.20.0", ["Gloo"]]'}, [], "Received: 0.28.1+tfdist.4 for 2.20.0 with Gloo."),
        ({"stdout": '["0.28.1", "2.21.0", ["Gloo"]]'}, [], "Received: 0.28.1 for 2.21.0 with Gloo."),
        ({}, ["--mpi"], "with Gloo, MPI. Received: 0.28.1+tfdist.4 for 2.21.0 with Gloo."),
        ({"code": "1", "stderr": "Traceback\nImportError: undefined symbol: _ZN"}, [], "undefined symbol: _ZN"),
    ],
)
def test_a_horovod_for_something_else_is_replaced_and_the_reason_said(
    probed, no_tools, tmp_path, capsys, answer, flags, reason
):
    probed |= answer
    assert run(f"--cache_dir={tmp_path}", *flags) == ExitCode.BAD_INPUT  # no tools to build with
    said = capsys.readouterr().out.splitlines()[0]
    assert said.startswith("Replacing the installed Horovod.")
    assert said.endswith(reason)


def test_without_tensorflow_there_is_nothing_to_build_for(monkeypatch, capsys):
    def version(name: str) -> str:
        raise install_horovod.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(install_horovod.importlib.metadata, "version", version)
    assert run() == ExitCode.BAD_INPUT
    assert capsys.readouterr().err.startswith("tfdist.install_horovod: TensorFlow must be installed.")
