"""The programs in this directory, and what is expected of each on replicas."""

import pathlib
from typing import NamedTuple

HERE = pathlib.Path(__file__).parent


class Program(NamedTuple):
    """A script as written by users."""

    path: str
    precision: str = "float64"  # Keras's floatx when results are compared
    quiet: tuple[str, ...] = ("--quiet",)  # options of `observed` that remove randomness
    tolerance: float = 0.0  # largest relative difference that counts as rounding; 0 for that of the precision
    refused: str = ""  # part of the error message if it is rejected; empty if it trains
    distribution: str = (
        ""  # why it has the distribution of one device, but not the same numbers; empty if they are equal
    )
    own_strategy: str = ""  # the only strategy, if the script creates it itself; empty if `tfdist run` chooses


_IN_A_CONDITION = "must not be inside tf.cond or tf.while_loop"
_SPECIAL = (
    Program("guides/alternating_optimizers.py", refused=_IN_A_CONDITION),
    Program("guides/gradient_accumulation.py", refused=_IN_A_CONDITION),
    Program("generative/wgan_gp.py", quiet=("--quiet", "--rows-differ")),
    Program("guides/kinds_of_layers.py", tolerance=1e-7),  # power iterations enlarge rounding errors
    Program("guides/transfer_learning_guide.py", tolerance=1e-8),
    Program("tutorials/distributed_mirrored.py", own_strategy="mirrored"),
    Program("tutorials/multi_worker_with_keras.py", own_strategy="multiworker"),
    Program(
        "tutorials/overfit_and_underfit.py",
        distribution="a data set that shuffles and repeats is prefetched, so that the next fit starts with another order",
    ),
    # Its metric knows no float64, and AdamW makes weights of the rounding in the gradients of its keys' biases.
    Program("vision/vision_transformer.py", precision="float32", tolerance=1e-2),
)


def programs() -> dict[str, Program]:
    """Returns all programs that call Keras, by path. Those of `horovod/` are for `tests/horovod/programs_test.py`."""
    special = {program.path: program for program in _SPECIAL}
    paths = sorted(str(path.relative_to(HERE)) for path in HERE.glob("*/*.py"))
    return {path: special.get(path, Program(path)) for path in paths if not path.startswith("horovod/")}
