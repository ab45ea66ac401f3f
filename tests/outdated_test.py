"""Newer versions of dependencies are named with the tests that pin the old ones; with pip's output instead of a network."""

import subprocess

import pytest

from tests import outdated

NO_NETWORK = """\
WARNING: pip index is currently an experimental command. It may be removed/changed in a future release without prior warning.
WARNING: Retrying (Retry(total=0, connect=None, read=None)) after connection broken by 'NewConnectionError(...)': /simple/keras/
ERROR: No matching distribution found for keras
"""


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The newest versions that a fake pip finds; at first those that the tests run with, without Horovod's patches."""
    versions = {name: str(version) for name, version in outdated.constraints() if name in outdated.PACKAGES}
    versions["horovod"] = "0.28.1"

    def run_pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        *_, group, action, package = command
        assert (group, action) == ("index", "versions")
        if package not in versions:
            return subprocess.CompletedProcess(command, 1, "", NO_NETWORK)
        text = f"{package} ({versions[package]})\nAvailable versions: {versions[package]}, 0.1\n  INSTALLED: 0.1\n"
        return subprocess.CompletedProcess(command, 0, text, "")

    monkeypatch.setattr(outdated.subprocess, "run", run_pip)
    return versions


def test_nothing_is_newer(index: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert outdated.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{package} {index[package]} is the newest version." for package in outdated.PACKAGES]


def test_a_newer_version_is_named_with_the_tests_to_run(index, capsys: pytest.CaptureFixture[str]) -> None:
    tested = index["horovod"]
    index["horovod"] = "0.100.0"  # newer as a version, but not as a string
    index["absl-py"] = "1000"
    assert outdated.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert "  No tests pin its behavior. Run: make test" in lines
    newer = lines.index(f"horovod 0.100.0 is newer than {tested}, which the tests run with.")
    assert lines[newer + 1].startswith("  python -m pytest -m '' tests/")
    assert "tests/traps/horovod_test.py" in lines[newer + 1]
    assert "tests/traps/dtensor_test.py" not in lines[newer + 1]
    assert len(lines) == len(outdated.PACKAGES) + 2


def test_without_a_network_there_is_one_line_and_no_answer(index, capsys: pytest.CaptureFixture[str]) -> None:
    del index["keras"]
    assert outdated.main() == 2
    said = capsys.readouterr()
    assert said.err == (
        "pip finds no version of keras: ERROR: No matching distribution found for keras. Is there a network?\n"
    )
    assert "keras" not in said.out


def test_every_test_of_a_dependency_s_behavior_names_the_dependency() -> None:
    named = {file for package in outdated.PACKAGES for file in outdated.files_that_pin(package)}
    folders = [outdated.ROOT / "tests" / name for name in ("traps", "keras_internals")]
    files = {str(path.relative_to(outdated.ROOT)) for folder in folders for path in folder.glob("*_test.py")}
    assert files and not files - named, "the docstring of the file, or of a test that guards, must name the package"
    assert "tests/horovod/operations_test.py" in outdated.files_that_pin(
        "horovod"
    )  # by a docstring that begins with Guards
