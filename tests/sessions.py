"""Runs the tests of `make check`, `make test` and `make test-all`, with ruff and mypy beside them, and counts them.

    python -m tests.sessions check
    python -m tests.sessions quick [--no-skips]
    python -m tests.sessions all
    python -m tests.sessions slow --slice=2/5 --since=HEAD~3

Tests that compute run one per core at a time. Those that wait for the clock or for small processes (`waits`) run four at a time
beside them, in a session of their own, which does not import what the others need.
"""

import argparse
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from typing import IO, NamedTuple

from tests import tiers
from tests.durations import REPORTS

_GROUPS = ("--dist=loadgroup", "--no-loadscope-reorder")
_COMPUTING = ("--numprocesses=logical", "--maxprocesses=4", *_GROUPS)
_WAITING = ("--numprocesses=4", *_GROUPS)
_PYTHON = (sys.executable, "-m")
LINT = (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",))
_NO_TESTS = 5  # exit code of pytest


class Session(NamedTuple):
    """A session of pytest: what `-m` selects, and its options."""

    name: str
    marks: str
    options: Sequence[str]


class Counts(NamedTuple):
    """Numbers of tests of a session."""

    passed: int = 0
    skipped: int = 0
    left_out: int = 0


def sessions(tier: str, options: Sequence[str]) -> list[Session]:
    """Returns the sessions of a tier: tests that compute, whose output is shown while they run, and then the others."""
    if tier == "plain":
        return [Session("plain", "not full", ("--tier=plain", *_COMPUTING))]
    chosen = (f"--tier={tier}", *options)
    return [
        Session(tier, "not waits and not full", (*chosen, *_COMPUTING)),
        Session(f"{tier}-waits", "waits and not full", (*chosen, *_WAITING)),
    ]


def command(session: Session) -> list[str]:
    """Returns the command of a session."""
    return [*_PYTHON, "pytest", "-q", "-rs", "-m", session.marks, *session.options, f"--junit-xml={report(session)}"]


def report(session: Session) -> pathlib.Path:
    """Returns the path of a session's report."""
    return REPORTS / f"{session.name}.xml"


def counts(session: Session) -> Counts:
    """Returns the numbers of tests of a session that has ended."""
    [suite] = ElementTree.parse(report(session)).iter("testsuite")
    tests, skipped, *failed = (int(suite.attrib[name]) for name in ("tests", "skipped", "failures", "errors"))
    left_out = REPORTS / "v" / tiers.LEFT_OUT / session.marks
    return Counts(tests - skipped - sum(failed), skipped, json.loads(left_out.read_text(encoding="utf-8")))


def summary(found: Sequence[Counts], minutes: float, tier: str) -> str:
    """Returns the last line: what passed, what was skipped, and what another command would run besides."""
    passed, skipped, left_out = (sum(numbers) for numbers in zip(*found, strict=True))
    text = f"{passed} tests passed in {minutes:.1f} min"
    if skipped:
        text += f", {skipped} skipped"
        if not importlib.util.find_spec("horovod"):
            text += ": make horovod builds what they need"
    return f"{text}; make test-all has {left_out} more" if tier == "quick" else text


def _start(words: Sequence[str]) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Starts a command; returns its process and the file with its output."""
    output = tempfile.TemporaryFile()
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT), output


def main(arguments: Sequence[str]) -> int:
    """Runs the tests; returns an exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.sessions", description="Runs the tests of a tier.")
    parser.add_argument("tier", choices=("check", "quick", "slow", "all"))
    parser.add_argument("--slice", help="N/M: the N-th of M parts.")
    parser.add_argument("--since", help="Adds tests of packages that have changed since this commit.")
    parser.add_argument("--no-skips", action="store_true", help="Skipped tests are failures.")
    flags = parser.parse_args(arguments)
    tier = "plain" if flags.tier == "check" else flags.tier
    options = [f"--{name}={value}" for name in ("slice", "since") if (value := getattr(flags, name))]

    start = time.monotonic()
    first, *others = sessions(tier, options)
    lint = [[*_PYTHON, *tool] for tool in LINT] if tier != "slow" else []
    beside = [_start(words) for words in (*(command(session) for session in others), *lint)]
    codes = [subprocess.run(command(first), check=False).returncode]
    for process, output in beside:
        codes.append(process.wait())
        output.seek(0)
        print(output.read().decode(), end="", flush=True)
    if failed := [code for code in codes if code not in (0, _NO_TESTS)]:
        return max(failed)
    found = [counts(session) for session in (first, *others)]
    print(summary(found, (time.monotonic() - start) / 60, tier))
    skips = sum(one.skipped for one in found)
    if flags.no_skips and skips:
        print(f"{skips} tests were skipped, and none may be.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
