"""`tfdist.gather_rows` in a script on several processes, with a short last batch whose rows are distributed unevenly."""

import pathlib

import pytest

from tests.programs import running
from tests.programs.catalog import Program

pytestmark = pytest.mark.processes

PROGRAM = Program(str(pathlib.Path(__file__).with_name("gathered_program.py")))


def test_it_gives_one_device_s_numbers_and_shares_the_work() -> None:
    plain = running.start(PROGRAM.path, "plain")
    ours = running.start(PROGRAM.path, "multiworker")
    assert running.verdict(PROGRAM, ours, plain) == "equal", ours.output
    assert "needs all rows" not in ours.output
