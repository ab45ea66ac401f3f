"""Programs that hang, crash or fail end as a line, and leave no process behind."""

import os
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.waiting import wait_for
from tfdist.cli.doctor_engines import ModuleRunner, ProgramResult
from tfdist.errors import ExitCode

pytestmark = pytest.mark.processes


Run = Callable[..., ProgramResult]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a program, given its name and source."""
    programs = tmp_path_factory.mktemp("programs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(programs), prepend=os.pathsep)
        with ModuleRunner() as children:

            def run(name: str, source: str, processes: int = 1, seconds: float = 60) -> ProgramResult:
                (programs / f"{name}.py").write_text(source)
                return children.run_module(name, ["given"], processes, seconds)

            yield run


def test_the_output_of_a_program_that_works(run: Run, capfd: pytest.CaptureFixture[str]):
    ended = run("works", "import os, sys\nprint(sys.argv[1], os.environ['TF_CONFIG'].count('127.0.0.1'))", 2)
    assert (ended.code, ended.reason, ended.text) == (0, "", "given 2\n")
    assert capfd.readouterr() == ("", "")


def test_a_hang_ends_with_the_deadline(run: Run):
    began = time.monotonic()
    source = (
        "import os, signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    )
    ended = run("hangs", source, 2, seconds=1)
    assert ended.code == ExitCode.STALLED
    assert ended.reason == "the processes did not end within 1 s"
    assert time.monotonic() - began < 30
    wait_for(lambda: not psutil.pid_exists(int(ended.text.split()[0])))  # another process reaps it


def test_a_crash(run: Run):
    ended = run("crashes", "import os\nprint('before', flush=True)\nos.abort()")
    assert ended.code == 134
    assert ended.reason == "rank 0 ended with code 134 (killed by SIGABRT)"


def test_an_exception_is_its_last_line(run: Run):
    ended = run("raises", "raise ImportError('libmpi.so.12: cannot open shared object file')", 2)
    assert (ended.code, ended.reason) == (1, "ImportError: libmpi.so.12: cannot open shared object file")


def test_an_error_of_a_command(run: Run):
    source = "import sys\nprint('tfdist verify: It must be so. Received: not so.', file=sys.stderr)\nsys.exit(2)"
    ended = run("refuses", source)
    assert (ended.code, ended.reason) == (2, "It must be so. Received: not so.")
