"""Jobs on this host whose output is kept, not shown."""

import contextlib
import dataclasses
import io
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType

from tfdist.launcher import job_runner
from tfdist.launcher.attempt import Ask
from tfdist.launcher.child import Start
from tfdist.launcher.job import Job
from tfdist.launcher.job_result import Outcome
from tfdist.launcher.local_process import NewProcess
from tfdist.launcher.orphan_guard import OrphanGuard

_GRACE_SECONDS = 1.0


class CapturedJobs:
    """Runs jobs, one after the other; no process and no file is left at its end."""

    def __init__(self, prefix: str):
        """Initializes without a process; `prefix`: beginning of the name of the temporary directory."""
        self._prefix = prefix

    def __enter__(self) -> "CapturedJobs":
        with contextlib.ExitStack() as stack:
            guard = stack.enter_context(OrphanGuard())  # cleans up if this process is killed
            self._directory = stack.enter_context(tempfile.TemporaryDirectory(prefix=self._prefix))
            guard.add_directory(self._directory)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def new_directory(self) -> Iterator[pathlib.Path]:
        """Context of a new directory for the files of a job, which is removed on exit: the files may be large."""
        with tempfile.TemporaryDirectory(dir=self._directory, ignore_cleanup_errors=True) as directory:
            yield pathlib.Path(directory)

    def run(
        self,
        job: Job,
        logs: pathlib.Path,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        stops: Sequence[Ask],
        start: Start = NewProcess,
    ) -> Outcome:
        """Runs a job until its end, see `job_runner.run`.

        Args:
          job: the processes.
          logs: directory of their output, for `log_dir` of the job.
          command: returns the command of a rank.
          environment: environment that the processes inherit.
          stops: polled for a reason to end the processes.
          start: starts a process.
        """
        job = dataclasses.replace(job, log_dir=str(logs), grace_seconds=_GRACE_SECONDS)
        shown = io.StringIO()  # the logs have it as well
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            return job_runner.run(job, command, environment, start=start, stops=stops)


def last_line(log: str) -> str:
    """Returns the last line that a process has printed, without the name of its command; empty if there is none."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    return re.sub(r"^tfdist \w+( \w+)?: ", "", last)


def read_log(path: pathlib.Path | None) -> str:
    """Returns what a process has printed; empty if there is no such file."""
    return path.read_text(encoding="utf-8", errors="replace") if path and path.exists() else ""
