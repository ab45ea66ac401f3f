"""Ranks that are forked from a process which has imported TensorFlow, through `tfdist launch`."""

import contextlib
import os
import pathlib
import re
import signal
import sys

import psutil
import pytest

from tests.launcher.launching import Launch, Launches
from tests.waiting import wait_for
from tfdist.errors import InputError
from tfdist.launcher import start_method
from tfdist.launcher.child import Start
from tfdist.launcher.local_process import NewProcess
from tfdist.launcher.orphan_guard import OrphanGuard

pytestmark = pytest.mark.processes

PARENT = "import os, psutil; print('parent', *psutil.Process(os.getppid()).cmdline())"
LIMIT = 300.0
RESTARTED = ("--processes=1", "--max_restarts=1", "--restart_backoff_seconds=0")


def ended(launcher: Launch) -> int:
    launcher.out, launcher.err = launcher.process.communicate(timeout=LIMIT)
    print(launcher.out, launcher.err)
    return launcher.process.returncode


def run(script: str, path: pathlib.Path) -> tuple[str, ...]:
    (path / "script.py").write_text(script)
    return sys.executable, "-m", "tfdist.run", "--strategy=multiworker", "script.py"


def server(launcher: Launch) -> psutil.Process:
    children = psutil.Process(launcher.process.pid).children()
    [found] = [child for child in children if "tfdist.launcher.fork_program" in child.cmdline()]
    return found


def opened(method: str, command: tuple[str, ...], several: bool = True) -> contextlib.AbstractContextManager[Start]:
    return start_method.opened(
        method, command, os.environ, OrphanGuard(), starts_several=several, interrupted=lambda: False
    )


@pytest.mark.parametrize(("method", "forked"), [("auto", True), ("spawn", False)])
def test_commands_of_tfdist_are_forked(method: str, forked: bool, launch: Launches, tmp_path: pathlib.Path) -> None:
    launcher = launch(*run(PARENT, tmp_path), flags=("--processes=2", f"--start_method={method}"))
    assert ended(launcher) == 0
    parents = re.findall(r"parent .*", launcher.out)
    assert len(parents) == 2
    assert [("fork_program" in parent) for parent in parents] == [forked, forked]


def test_the_executable_is_forked_as_its_module(launch: Launches, tmp_path: pathlib.Path) -> None:
    """By its name, as the environment's directory comes first on the PATH."""
    rest = run(f"{PARENT}; import sys; print('argv', sys.orig_argv[1:])", tmp_path)[3:]
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    launcher = launch("tfdist", "run", *rest, flags=("--processes=2",), PATH=path)
    assert ended(launcher) == 0
    assert ["fork_program" in parent for parent in re.findall(r"parent .*", launcher.out)] == [True, True]
    assert re.findall(r"argv (.*)", launcher.out) == [str(["-m", "tfdist.run", *rest])] * 2


@pytest.mark.parametrize(
    ("command", "module"),
    [
        (("tfdist", "train", "--steps=3"), ("python", "-m", "tfdist.train", "--steps=3")),
        (("python", "-m", "tfdist", "verify"), ("python", "-m", "tfdist.verify")),
        (("tfdist",), None),
        (("tfdist", "ledger", "runs/one"), None),
        (("tfdist", "help", "train"), None),
        (("python", "-m", "tfdist"), None),
        (("python", "-m", "tfdist.train"), None),
        (("python", "tfdist", "train"), None),
        (("elsewhere/tfdist", "train"), None),
    ],
)
def test_a_command_of_tfdist_as_its_module(
    command: tuple[str, ...], module: tuple[str, ...] | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("bin", "elsewhere"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tfdist").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    expected = [*(module or command)]
    if module and command[0] == "tfdist":
        expected[0] = sys.executable
    assert [*start_method.as_module(command, {"PATH": str(tmp_path / "bin")})] == expected


def test_programs_of_users_are_forked_on_request(launch: Launches, tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text(f"{PARENT}; import sys; sys.exit(3 + ('tensorflow' in sys.modules))")
    for flags, code in (((), 3), (("--start_method=forkserver",), 4)):
        launcher = launch(sys.executable, "script.py", flags=("--processes=2", *flags))
        assert ended(launcher) == code


def test_a_restart_without_the_server_imports_again(launch: Launches, tmp_path: pathlib.Path) -> None:
    waits = "os.environ['TFDIST_RESTART'] == '0' and time.sleep(600)"
    script = f"{PARENT}\nimport pathlib, time; pathlib.Path('up').touch(); {waits}"
    launcher = launch(*run(script, tmp_path), flags=RESTARTED)
    wait_for((tmp_path / "up").exists)
    server(launcher).kill()
    assert ended(launcher) == 0
    assert "rank 0 ended with code 137" in launcher.err
    assert "each rank imports it" in launcher.err
    assert ["fork_program" in parent for parent in re.findall(r"parent .*", launcher.out)] == [True, False]


def test_a_killed_launcher_leaves_no_server(launch: Launches, tmp_path: pathlib.Path) -> None:
    launcher = launch(*run("import time; print('up'); time.sleep(600)", tmp_path), flags=("--processes=2",))
    while "up" not in launcher.read_line():
        pass
    os.kill(launcher.process.pid, signal.SIGKILL)
    wait_for(lambda: not launch.running())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("sh", "-c"), 'without options for the interpreter. Received: "sh -c".'),
        ((sys.executable, "-I", "a.py"), '-I". Leave it out.'),
    ],
)
def test_what_is_refused(command: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)), opened("forkserver", command):
        pass


@pytest.mark.parametrize(
    ("command", "several"),
    [
        ((sys.executable, "-m", "tfdist.train"), False),
        ((sys.executable, "-m", "mine"), True),
        ((sys.executable, "mine.py"), True),
        (("sh", "-c", "true"), True),
    ],
)
def test_auto_starts_other_commands_and_single_processes_as_before(command: tuple[str, ...], several: bool) -> None:
    with opened("auto", command, several) as start:
        assert start is NewProcess


def test_a_launcher_that_is_asked_to_end_does_not_wait_for_the_imports(
    launch: Launches, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "keras").mkdir()
    imports = tmp_path / "imports"
    (tmp_path / "keras" / "__init__.py").write_text(
        f"open({str(imports)!r}, 'w').close()\nimport time; time.sleep(1000)"
    )
    launcher = launch(*run("", tmp_path), flags=("--processes=2",), PYTHONPATH=str(tmp_path))
    wait_for(imports.exists)
    launcher.process.send_signal(signal.SIGTERM)
    assert ended(launcher) == 128 + signal.SIGTERM
    assert "is not available" not in launcher.err
