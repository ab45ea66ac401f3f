"""The programs in this directory, and what is expected of each on replicas."""

import pathlib
from typing import NamedTuple

HERE = pathlib.Path(__file__).parent


class Program(NamedTuple):
    """A script as written by users."""

    path: str
    quiet: tuple[str, ...] = ("--quiet",)  # options of `observed` that remove randomness
    tolerance: float = 1e-9  # largest relative difference that counts as rounding
    refused: str = ""  # part of the error message if it is rejected; empty if it trains
    distribution: str = (
        ""  # why it has the distribution of one device, but not the same numbers; empty if they are equal
    )
    own_strategy: str = ""  # the only strategy, if the script creates it itself; empty if `tfdist run` chooses


_SPECIAL = (
    Program("guides/gradient_accumulation.py", refused="must not be inside tf.cond or tf.while_loop"),
    Program("generative/wgan_gp.py", quiet=("--quiet", "--rows-differ")),
    Program("guides/kinds_of_layers.py", tolerance=1e-7),  # power iterations enlarge rounding errors
    Program("guides/transfer_learning_guide.py", tolerance=1e-8),
    Program("tutorials/distributed_mirrored.py", own_strategy="mirrored"),
    Program("tutorials/multi_worker_with_keras.py", own_strategy="multiworker"),
    Program(
        "tutorials/overfit_and_underfit.py",
        distribution="a dataset that shuffles and repeats is prefetched, so that the next fit starts with another order",
    ),
)


def programs() -> dict[str, Program]:
    """Returns all programs that call Keras, by path. Those of `horovod/` are for `tests/horovod/programs_test.py`."""
    special = {program.path: program for program in _SPECIAL}
    paths = sorted(str(path.relative_to(HERE)) for path in HERE.glob("*/*.py"))
    return {path: special.get(path, Program(path)) for path in paths if not path.startswith("horovod/")}
