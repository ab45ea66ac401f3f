"""One process of a job that fits programs: writes what came of it, in float64.

python tests/keras_fit/worker.py STRATEGY DIRECTORY RANK PROGRAM...
"""

import pathlib
import pickle
import sys

import keras

import tfdist

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
from tests.keras_fit.models import PROGRAMS, run


def main(name: str, directory: str, rank: str, *programs: str) -> None:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    strategy = tfdist.load_strategy(name, start_timeout_seconds=60)
    outcomes = {}
    for program in programs:
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        with strategy.scope():
            made = PROGRAMS[program]()
        tfdist.distribute(made.model)
        outcomes[program] = run(made)
    pathlib.Path(directory, f"{rank}.pickle").write_bytes(pickle.dumps(outcomes))
    strategy.group.barrier("done")
    strategy.group.leave()
    strategy.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
