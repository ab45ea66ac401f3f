import os
import subprocess
import sys

from tfdist import step_note


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


def test_where_nobody_wants_to_know_a_note_goes_nowhere(tmp_path):
    notes = step_note.StepNote({})
    notes.note(3)
    notes.close()
