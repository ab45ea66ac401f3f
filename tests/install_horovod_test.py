"""The installer's messages, what it refuses to install, and when it changes nothing; without network and compiler."""

import hashlib
import importlib
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

from tests.cli import horovod_build_test
from tfdist import install_horovod
from tfdist.cli import command, horovod_build
from tfdist.errors import ExitCode, TfdistError


def run(*arguments: str) -> int:
    """Runs the command as from a shell."""
    return command.run("install_horovod", install_horovod.InstallConfig, install_horovod.main, ["program", *arguments])


no_tools = horovod_build_test.no_tools


@pytest.mark.smoke("install_horovod")
def test_a_failed_pip_is_one_line_with_the_cause_and_the_log(tmp_path: pathlib.Path):
    log = install_horovod.Log(tmp_path / "install.log")
    with pytest.raises(
        TfdistError, match=r"^`pip no-such-command` failed: ERROR: unknown command .*\(log: .*install.log\)$"
    ):
        log.pip("no-such-command")
    assert log.path.read_text().startswith(f"$ {sys.executable}")


def test_a_missing_tool_ends_the_command_with_code_2(no_tools, tmp_path, capsys):
    code = run("--force", f"--cache_dir={tmp_path / 'cache'}")
    assert code == ExitCode.BAD_INPUT
    assert capsys.readouterr().err == (
        "tfdist install_horovod: Building Horovod requires g++, which was not found. Install the Debian package g++.\n"
    )


@pytest.mark.parametrize("variables", [{"XDG_CACHE_HOME": "/xdg"}, {}])
def test_the_cache_is_where_the_user_keeps_caches(variables, monkeypatch, capsys):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    importlib.reload(install_horovod)
    assert run("--help") == ExitCode.DONE
    assert f"{variables.get('XDG_CACHE_HOME', '~/.cache')}/tfdist/horovod" in capsys.readouterr().out


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Fakes the output of the probe of the installed Horovod."""
    answer = {"stdout": '["0.28.1+tfdist.6", "2.21.0", ["Gloo"]]', "stderr": "", "code": "0"}

    def run_probe(command, **_):
        assert "horovod.tensorflow" in command[-1]
        return subprocess.CompletedProcess(command, int(answer["code"]), answer["stdout"], answer["stderr"])

    monkeypatch.setattr(install_horovod.subprocess, "run", run_probe)
    monkeypatch.setattr(install_horovod.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(install_horovod.importlib.metadata, "version", lambda name: "2.21.0")
    return answer


def test_a_horovod_that_works_is_left_alone(probed, tmp_path, capsys):
    assert run(f"--cache_dir={tmp_path}") == ExitCode.DONE
    assert capsys.readouterr().out == "Horovod 0.28.1+tfdist.6 (Gloo) works with TensorFlow 2.21.0. Nothing to do.\n"
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("answer", "flags", "reason"),
    [
        ({"stdout": '["0.28.1+tfdist.6", "2.20.0", ["Gloo"]]'}, [], "Received: 0.28.1+tfdist.6 for 2.20.0 with Gloo."),
        ({"stdout": '["0.28.1", "2.21.0", ["Gloo"]]'}, [], "Received: 0.28.1 for 2.21.0 with Gloo."),
        ({}, ["--mpi"], "with Gloo, MPI. Received: 0.28.1+tfdist.6 for 2.21.0 with Gloo."),
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
    assert capsys.readouterr().err.startswith("tfdist install_horovod: TensorFlow is required, but was not found in ")


WHEEL = "horovod-0.28.1+tfdist.6-cp311-cp311-linux_x86_64.whl"


@pytest.fixture
def cached(probed, no_tools, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A wheel in the cache, on a machine that cannot build another one; what pip installs works."""
    works = probed["stdout"]
    probed["stdout"] = works.replace("+tfdist.6", "")
    monkeypatch.setattr(install_horovod.Log, "pip", lambda self, *_, **__: probed.update(stdout=works))
    built, folder = tmp_path / WHEEL, tmp_path / "cache" / horovod_build.Build("2.21.0").key
    built.write_bytes(b"a wheel")
    horovod_build.make_private(tmp_path / "cache")
    horovod_build.make_private(folder)
    return built.replace(folder / WHEEL)


def test_a_wheel_that_this_command_has_built_is_installed_again(cached: pathlib.Path, capsys):
    assert run(f"--cache_dir={cached.parents[1]}") == ExitCode.DONE
    assert f"Installing {cached}\n" in capsys.readouterr().out


@pytest.mark.parametrize(("level", "mode"), [(0, 0o777), (0, 0o720), (1, 0o702)])
def test_a_cache_where_others_may_write_is_bad_input(cached: pathlib.Path, level, mode, capsys):
    directory = (cached.parent.parent, cached.parent)[level]
    directory.chmod(mode)
    assert run(f"--cache_dir={cached.parents[1]}") == ExitCode.BAD_INPUT
    said = capsys.readouterr()
    assert (
        f"Received: {directory}, owned by user {os.geteuid()}, with mode {mode:04o}. Run: chmod go-w {directory}, or"
        in said.err
    )
    assert "Installing" not in said.out


def test_another_user_s_cache_is_bad_input(cached: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys):
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert run(f"--cache_dir={cached.parents[1]}") == ExitCode.BAD_INPUT
    assert "The cache must be a directory that you own and that no one else can write to" in capsys.readouterr().err


@pytest.fixture
def index(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A directory in which pip finds nothing but a wheel of cloudpickle, the only package of the build."""
    requirement = horovod_build.requirement("cloudpickle").split()[0]
    name = requirement.replace("==", "-")
    wheel = tmp_path / "index" / f"{name}-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            f"{name}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: cloudpickle\nVersion: {name[12:]}\n"
        )
        archive.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{name}.dist-info/RECORD", "")
    for variable, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.parent)}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(horovod_build, "PACKAGES", ("cloudpickle",))
    monkeypatch.setattr(horovod_build, "check_tools", lambda build: None)
    return wheel


def test_a_package_of_the_build_with_other_contents_is_refused(index: pathlib.Path, tmp_path: pathlib.Path):
    log = install_horovod.Log(tmp_path / "install.log")
    with pytest.raises(TfdistError, match="^`pip install` failed: ERROR: THESE PACKAGES DO NOT MATCH THE HASHES"):
        install_horovod.make_wheel(horovod_build.Build("2.21.0"), tmp_path, log)


def test_a_package_of_the_build_is_installed_whatever_constrains_the_environment(index, tmp_path, monkeypatch):
    """The same wheel, with its own hash."""
    digest = hashlib.sha256(index.read_bytes()).hexdigest()
    pinned = f"{horovod_build.requirement('cloudpickle').split()[0]} --hash=sha256:{digest}"
    monkeypatch.setattr(horovod_build, "REQUIREMENTS", tmp_path / "requirements.txt")
    horovod_build.REQUIREMENTS.write_text(f"{pinned}\n")

    def installed() -> None:
        raise InterruptedError  # what follows would take minutes

    (tmp_path / "constraints.txt").write_text("cloudpickle==1.0\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraints.txt"))
    monkeypatch.setattr(horovod_build, "find_cmake", installed)
    log = install_horovod.Log(tmp_path / "install.log")
    with pytest.raises(InterruptedError):
        install_horovod.make_wheel(horovod_build.Build("2.21.0"), tmp_path, log)
    assert "Successfully installed cloudpickle" in log.path.read_text()
