"""Verify that a strategy gives the same result as one device, on your own model and data."""

import sys

from tfdist.cli import command, flags, tensorflow_import
from tfdist.config.train_config import VerifyConfig
from tfdist.errors import ExitCode


def main(config: VerifyConfig) -> int:
    """Trains twice and compares; returns 0 if the results are equal within the tolerance, else 1."""
    tensorflow_import.load_tensorflow()  # imported late, so that flags are parsed and help is printed before
    import keras

    from tfdist.cli import session
    from tfdist.testing import comparison

    if config.float64:
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
    with session.opened(config) as opened:
        good = comparison.verify(opened, print if opened.strategy.is_chief else _nothing)
        good = opened.strategy.group.broadcast("verify/good", good, deadline=comparison.REFERENCE_SECONDS)
    return ExitCode.DONE if good else ExitCode.FAILED


def _nothing(_: str) -> None:
    """Prints nothing, on the other ranks."""


if __name__ == "__main__":
    sys.exit(
        command.run(
            "verify",
            lambda values: flags.define(values, VerifyConfig),
            lambda values: main(flags.config(values, VerifyConfig)),
            about=__doc__,
        )
    )
