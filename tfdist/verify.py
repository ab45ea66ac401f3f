"""Verify that a strategy gives the same result as one device, on your own model and data."""

import sys

from tfdist.cli import command, early_checks
from tfdist.cli.output import TEXT, Output
from tfdist.cluster.quiet_tensorflow import load_tensorflow
from tfdist.config.train_config import VerifyConfig
from tfdist.errors import ExitCode


def main(config: VerifyConfig, output: Output = TEXT) -> int:
    """Trains twice and compares; returns 0 if the results are equal within the tolerance, else 1."""
    context = early_checks.check_cluster(config, early_checks.detect_context(config))
    early_checks.check_data(config, context)
    load_tensorflow()  # imported late, after parsing flags
    import keras

    from tfdist.cli import comparison, run

    if config.float64:
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
    with run.open_session(config, context) as session:
        strategy = session.strategy
        result = comparison.verify(session, output.line if strategy.is_chief else lambda _: None)
        if result:
            output.result(result)
        is_equal = strategy.group.broadcast(
            "verify/good", result["equal"] if result else None, deadline=comparison.REFERENCE_SECONDS
        )
    return ExitCode.DONE if is_equal else ExitCode.FAILED


_EXAMPLES = (
    "tfdist verify --strategy=mirrored --devices=2 --model=mlp --steps=5 --float64",
    "tfdist launch --processes=2 -- tfdist verify --model='mlp(hidden=(64,))' --optimizer=sgd --steps=5",
)

if __name__ == "__main__":
    sys.exit(command.run("verify", VerifyConfig, main, about=__doc__, has_json=True, examples=_EXAMPLES))
