"""Runs the blocks of a page in order, in a directory that looks like the checkout, as a reader would."""

import fcntl
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from typing import NamedTuple

from tests.documents import comparison
from tests.documents.blocks import Block, Step
from tfdist.cluster import environment

ROOT = pathlib.Path(__file__).parents[2]
DEADLINE_SECONDS = 300
_COPIED, _LINKED = ("examples", "benchmarks"), ("tests", "docs", "pyproject.toml", "setup.cfg")
_KEY = "^C"  # what a terminal shows for Ctrl-C
_TRAINS = re.compile(r"(\[\d+\] )?step \d+")  # the line of progress after which the key is pressed
_FAILED = re.compile(r"(\[\d+\] )?tfdist( \w+)*: |\^C$")  # a page shows errors, too


class Result(NamedTuple):
    """What a step did."""

    block: Block
    step: Step
    code: int
    output: list[str]

    @property
    def problem(self) -> str:
        """What is wrong, with the output; "" if it is as the page says."""
        shown = "\n".join(self.output[-60:])
        where = f"line {self.block.line}: {self.step.text}"
        if self.code and not any(map(_FAILED.match, self.step.expected or ())):
            return f"{where}\nended with code {self.code}:\n{shown}"
        if not self.step.expected or comparison.same(self.step.expected, self.output, bool(self.block.any_numbers)):
            return ""
        return f"{where}\nthe page shows:\n" + "\n".join(self.step.expected) + f"\nthe output is:\n{shown}"


def run(blocks: list[Block], folder: pathlib.Path) -> Iterator[Result]:
    """Runs the blocks of a page; the directory and the variables of one command are those of the next."""
    _prepare(folder)
    for number, block in enumerate(block for block in blocks if not block.not_run):
        for command in block.first:
            yield _shell(block, Step(command, None), folder)
        for step in block.steps:
            if block.kind != "python":
                yield _shell(block, step, folder)
            elif block.title:
                (folder / block.title).write_text(step.text, encoding="utf-8")
            else:
                program = folder / f"block{number}.py"
                program.write_text(step.text, encoding="utf-8")
                yield _shell(block, step._replace(text=f"python {program}"), folder)


def _prepare(folder: pathlib.Path) -> None:
    for name in _COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in _LINKED:
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / ".home").mkdir()
    (folder / ".here").write_text(str(folder), encoding="utf-8")


def _shell(block: Block, step: Step, folder: pathlib.Path) -> Result:
    """Runs a command in bash, in a process group of its own."""
    state, here = folder / ".variables", folder / ".here"
    script = f'[ -e {state} ] && source {state}; cd "$(cat {here})"\n{step.text}\ncode=$?\n'
    script += f"export -p >{state}; pwd >{here}; exit $code"
    is_key_due = _KEY in (step.expected or ())
    terminal, keys = os.openpty()
    process = subprocess.Popen(
        ["bash", "-c", script],
        env=_environment(folder),
        stdin=keys if is_key_due else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=_take_keys if is_key_due else None,
    )
    timer = threading.Timer(DEADLINE_SECONDS, _signal, (process, signal.SIGKILL))
    timer.start()
    output: list[str] = []
    assert process.stdout
    with process.stdout:
        for line in process.stdout:
            output.append(line.rstrip())
            if is_key_due and _TRAINS.match(line):
                is_key_due = False
                output.append(_KEY)
                os.write(terminal, b"\x03")
    code = process.wait()
    os.close(terminal)
    os.close(keys)
    timer.cancel()
    return Result(block, step, code, output)


def _take_keys() -> None:
    """Makes standard input the terminal of the process, whose Ctrl-C it does not ignore."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _signal(process: subprocess.Popen, number: signal.Signals) -> None:
    os.killpg(process.pid, number)


def _environment(folder: pathlib.Path) -> dict[str, str]:
    """Returns the variables of a reader's shell, without those of this process's job or of an outer test."""
    names = ("TFDIST_", "PYTEST_", "KERAS_", "MAKE")
    inherited = {k: v for k, v in environment.without_rank_variables(os.environ).items() if not k.startswith(names)}
    inherited.pop("TF_CPP_MIN_LOG_LEVEL", None)
    bin_folder = pathlib.Path(sys.executable).parent
    own = {"PATH": f"{bin_folder}:{inherited['PATH']}", "HOME": str(folder / ".home"), "COLUMNS": "120"}
    return (
        inherited | own | {"MPLCONFIGDIR": os.environ.get("MPLCONFIGDIR", os.path.expanduser("~/.config/matplotlib"))}
    )
