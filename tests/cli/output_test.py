"""`--json`: one object on standard output and nothing else, whoever writes there."""

import json
import subprocess
import sys

import pytest

from tests.user_commands import captured

_COMMAND = """
import os, sys
from tfdist.cli import command
from tfdist.errors import InputError

def call(values, output):
    output.line("as text")
    print("a model's line")
    os.write(1, b"a library's line\\n")
    {body}
    return 3

sys.exit(command.run("toy part", lambda values: None, call, has_json=True))
"""


def run(body: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return captured([sys.executable, "-c", _COMMAND.format(body=body), *flags])


def test_one_object_and_nothing_else():
    done = run(
        "output.result({'loss': float('nan'), 'steps': [{'seconds': 1.5}, {'seconds': float('inf')}]})", "--json"
    )
    assert done.returncode == 3
    [line] = done.stdout.splitlines()
    steps = [{"seconds": 1.5}, {"seconds": None}]
    assert json.loads(line) == {"schema": 1, "command": "toy", "loss": None, "steps": steps}
    assert done.stderr.splitlines() == ["a model's line", "a library's line"]


def test_text_without_the_flag():
    done = run("output.result({'a': 1})")
    assert sorted(done.stdout.splitlines()) == ["a library's line", "a model's line", "as text"]


@pytest.mark.parametrize("body", ["pass", "raise InputError('It must be so. Received: not so.')"])
def test_nothing_without_a_result_or_after_an_error(body: str):
    done = run(body, "--json")
    assert not done.stdout
    assert ("It must be so." in done.stderr) == (done.returncode == 2)
