"""How a launcher starts its ranks: as new interpreters, or by forks of a process that has imported TensorFlow."""

import contextlib
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from tfdist.errors import InputError
from tfdist.grammar.spec import nearest
from tfdist.launcher.child import Start
from tfdist.launcher.fork_server import TRAINING_IMPORTS, ForkServer, can_fork
from tfdist.launcher.local_process import LocalProcess, NewProcess
from tfdist.launcher.orphan_guard import OrphanGuard
from tfdist.process import keras_backend, status_line

METHODS = ("auto", "forkserver", "spawn")  # the names of `multiprocessing`
_COMMANDS = ("tfdist.train", "tfdist.run", "tfdist.verify", "tfdist.bench")
_PACKAGE = "tfdist"  # the name of the executable, too
_log = logging.getLogger("tfdist.launch")


def check(method: str) -> None:
    """Raises `InputError` if there is no such method."""
    if method not in METHODS:
        raise InputError(
            f'--start_method must be one of {", ".join(METHODS)}. Received: "{method}".{nearest(method, METHODS)}'
        )


def as_module(command: Sequence[str], environment: Mapping[str, str]) -> Sequence[str]:
    """Returns `tfdist NAME ...`, or `python -m tfdist NAME ...`, as the equal `python -m tfdist.NAME ...`.

    Args:
      command: a program and its arguments. Others, and an executable of another environment, are returned as they are.
      environment: contains the PATH on which the program is found.
    """
    if os.path.basename(command[0]) == _PACKAGE:
        program = shutil.which(command[0], path=environment.get("PATH"))
        here = os.path.dirname(os.path.abspath(sys.executable))
        if program is None or os.path.dirname(os.path.abspath(program)) != here:
            return command
        python, arguments = sys.executable, command[1:]
    elif [*command[1:3]] == ["-m", _PACKAGE]:
        python, arguments = command[0], command[3:]
    else:
        return command
    is_ours = bool(arguments) and f"{_PACKAGE}.{arguments[0]}" in _COMMANDS
    return [python, "-m", f"{_PACKAGE}.{arguments[0]}", *arguments[1:]] if is_ours else command


def check_imports(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raises `InputError` if ranks that run a command of tfdist would import Keras with another backend than TensorFlow."""
    if _is_ours(as_module(command, environment)):
        keras_backend.check()


def _is_ours(module: Sequence[str]) -> bool:
    """Returns whether a command is one of tfdist; a program of a user may set variables that are read by the imports."""
    return [*module[1:2]] == ["-m"] and module[2] in _COMMANDS


@contextlib.contextmanager
def opened(
    method: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    guard: OrphanGuard,
    imports: Sequence[str] = (),
    *,
    starts_several: bool,
    interrupted: Callable[[], object],
) -> Iterator[Start]:
    """Yields a function that starts a rank, and ends what it needs.

    Args:
      method: one of `METHODS`. "auto" forks for tfdist's commands on Linux, if the imports are needed more than once.
      command: what every rank runs.
      environment: environment that the ranks inherit.
      guard: kills the server if this process is killed.
      imports: modules that all ranks import, besides TensorFlow and Keras.
      starts_several: whether several ranks are started, together or one after the other.
      interrupted: polled during the imports; whether the job is to end.

    Raises:
      InputError: the command cannot be started by the method.
    """
    module = as_module(command, environment)
    possible = sys.platform == "linux" and can_fork(module, environment)
    is_ours = possible and _is_ours(module)
    if method == "forkserver" and not possible:
        raise InputError(
            "--start_method=forkserver needs Linux, and a program for the Python interpreter of the launcher, without "
            f'options for the interpreter. Received: "{" ".join(command[:2])}". Leave it out.'
        )
    if method == "spawn" or not possible or (method == "auto" and not (is_ours and starts_several)):
        yield NewProcess
        return
    with ForkServer([TRAINING_IMPORTS, *imports], environment) as server:
        guard.add(server.pid)
        try:
            yield _Forks(server, interrupted)
        finally:
            guard.forget(server.pid)


class _Forks:
    """Starts ranks by forks, or as new interpreters once the server is not available."""

    def __init__(self, server: ForkServer, interrupted: Callable[[], object]):
        self._server: ForkServer | None = server
        self._interrupted = interrupted

    def __call__(self, command: Sequence[str], environment: Mapping[str, str], out: int, err: int) -> LocalProcess:
        if self._server:
            try:
                with status_line.showing("Loading TensorFlow ..."):
                    self._server.wait_until_ready(self._interrupted)
                return self._server.start(as_module(command, environment), environment, out, err)
            except OSError as error:
                self._server = None
                if not self._interrupted():
                    _log.warning(
                        "tfdist launch: the process that imports TensorFlow for all ranks is not available, so that each "
                        "rank imports it: %s",
                        error,
                    )
        return NewProcess(command, environment, out, err)
