"""A program that uses the library, and a notebook, see their own output, and not what TensorFlow prints when it starts."""

import os
import subprocess
import sys

import pytest

from tfdist.cluster import quiet_tensorflow

PROGRAM = """\
import sys, tfdist
sys.ps1 = "> "  # as in a notebook, where TensorFlow prints more
strategy = tfdist.load_strategy("mirrored", devices=2)
import tensorflow as tf
with strategy.scope():
    variable = tf.Variable(1.0)
print(strategy)
"""


@pytest.mark.processes
def test_the_library_starts_silently_unless_a_variable_asks_for_messages():
    def run(level: dict[str, str]) -> list[str]:
        inherited = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
        command = [sys.executable, "-c", PROGRAM]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 120}
        return subprocess.run(command, env=inherited | level, check=True, **options).stdout.splitlines()

    assert run({}) == ["<Mirrored: 2 replicas>"]
    assert len(run({"TF_CPP_MIN_LOG_LEVEL": "0"})) > 3


@pytest.mark.processes
def test_it_is_imported_without_a_stderr():
    command = f'"{sys.executable}" -c "import tfdist; tfdist.Strategy; print(1)" 2>&-'
    done = subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "1\n")


def test_without_a_directory_for_temporary_files_everything_is_shown(monkeypatch, capfd):
    def missing():
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr("tempfile.TemporaryFile", missing)
    with quiet_tensorflow.filter_stderr():
        os.write(2, b"I0000 00:00:1795659360.924996   31137 port.cc:153] oneDNN\n")
    assert "oneDNN" in capfd.readouterr().err


def test_messages_of_others_are_shown(capfd: pytest.CaptureFixture[str]):
    with quiet_tensorflow.filter_stderr():
        os.write(2, b"I0000 00:00:1795659360.924996   31137 port.cc:153] oneDNN custom operations are on.\nmine\n")
    assert capfd.readouterr().err == "mine\n"


def test_everything_is_shown_before_an_exception(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(ImportError), quiet_tensorflow.filter_stderr():
        os.write(2, b"E0000 00:00:1795659360.924996   31137 cuda.cc:1] no driver\n")
        raise ImportError
    assert "no driver" in capfd.readouterr().err


def test_variables_are_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFDIST_TEST_BEFORE", "1")
    monkeypatch.delenv("TFDIST_TEST_UNSET", raising=False)
    with (
        pytest.raises(ValueError, match="in the context"),
        quiet_tensorflow.temporary_environment_variables({"TFDIST_TEST_BEFORE": "2", "TFDIST_TEST_UNSET": "3"}),
    ):
        assert (os.environ["TFDIST_TEST_BEFORE"], os.environ["TFDIST_TEST_UNSET"]) == ("2", "3")
        raise ValueError("in the context")
    assert os.environ["TFDIST_TEST_BEFORE"] == "1" and "TFDIST_TEST_UNSET" not in os.environ
