import os
import subprocess
import sys

import pytest

from tfdist import step_note

pytestmark = pytest.mark.alone


def test_a_note_outlives_the_process(tmp_path):
    path = tmp_path / "note"
    step_note.blank(path)
    assert step_note.read(path) is None
    code = (
        "import os\nfrom tfdist.step_note import StepNote\nnotes = StepNote()\n"
        "for step in (5, 10**12, 7): notes.note(step)\nos.kill(os.getpid(), 9)"
    )
    environment = os.environ | {step_note.VARIABLE: str(path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=20).returncode == -9
    assert step_note.read(path) == 7


def test_the_next_process_begins_without_it_and_needs_no_room(tmp_path):
    path = tmp_path / "note"
    step_note.blank(path)
    step_note.forbid_restart({step_note.VARIABLE: str(path)})
    place = path.stat().st_ino
    step_note.blank(path)
    assert step_note.read(path) is None and not step_note.forbids_restart(path)
    assert path.stat().st_ino == place


@pytest.mark.parametrize("environment", [{}, {step_note.VARIABLE: "/nowhere/rank-0"}])  # which somebody has removed
def test_where_nobody_wants_to_know_a_note_goes_nowhere(environment):
    notes = step_note.StepNote(environment)
    notes.note(3)
    notes.close()


def test_a_process_forbids_that_it_is_started_again_until_the_next_one_is(tmp_path):
    path = tmp_path / "note"
    environment = {step_note.VARIABLE: str(path)}
    step_note.blank(path)
    notes = step_note.StepNote(environment)
    notes.note(10**19)
    assert not step_note.forbids_restart(path)
    step_note.forbid_restart(environment)
    notes.note(7)
    assert step_note.forbids_restart(path) and step_note.read(path) == 7
    step_note.blank(path)
    assert not step_note.forbids_restart(path) and step_note.read(path) is None
    step_note.forbid_restart({})  # nobody wants to know
