"""The line by which a command refuses its arguments."""

from collections.abc import Callable

import pytest

from tfdist import launch
from tfdist.cli import command, flags


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Returns what a command says about wrong arguments; it must be one line, with exit code 2."""

    def said(*argv: str, name: str = "train") -> str:
        def call(values):
            assert name == "train" and flags.config(values)
            pytest.fail("the command ran")

        define = {"train": flags.define, "launch": launch.define_flags}.get(name, lambda values: None)
        code = command.run(name, define, call, ["program", *argv])
        captured = capsys.readouterr()
        assert (code, captured.out, captured.err.count("\n")) == (2, "", 1), captured
        assert captured.err.startswith(f"tfdist.{name}: ")
        return captured.err

    return said
