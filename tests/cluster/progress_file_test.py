import os
import subprocess
import sys

import pytest

from tfdist.cluster import progress_file

pytestmark = [pytest.mark.processes, pytest.mark.waits]


def test_a_note_outlives_the_process(tmp_path):
    path = tmp_path / "note"
    progress_file.create(path)
    assert progress_file.read(path) == (None, False)
    code = (
        "import os\nfrom tfdist.cluster.progress_file import ProgressFile\nnotes = ProgressFile()\n"
        "for step in (5, 10**12, 7): notes.note(step)\nos.kill(os.getpid(), 9)"
    )
    environment = os.environ | {progress_file.VARIABLE: str(path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=300).returncode == -9
    assert progress_file.read(path) == (7, False)


@pytest.mark.parametrize("environment", [{}, {progress_file.VARIABLE: "/nowhere/rank-0"}])  # deleted meanwhile
def test_where_nobody_wants_to_know_a_note_goes_nowhere(environment):
    notes = progress_file.ProgressFile(environment)
    notes.note(3)
    notes.close()


def test_a_process_forbids_that_it_is_started_again_until_the_next_one_is(tmp_path):
    path = tmp_path / "note"
    environment = {progress_file.VARIABLE: str(path)}
    progress_file.create(path)
    notes = progress_file.ProgressFile(environment)
    notes.note(10**19)
    assert progress_file.read(path) == (10**19, False)
    progress_file.forbid_restart(environment)
    notes.note(7)
    assert progress_file.read(path) == (7, True)
    place = path.stat().st_ino
    progress_file.create(path)
    assert progress_file.read(path) == (None, False)
    assert path.stat().st_ino == place  # it needs no room
    progress_file.forbid_restart({})  # no launcher needs it
