"""One process of a job that saves, waits until everybody has saved, and goes on from each.

python tests/end_to_end/resume/worker.py STRATEGY CASE DIRECTORY RANK SAVER...
"""

import pathlib
import pickle
import sys

import keras

import tfdist

sys.path.insert(0, str(pathlib.Path(__file__).parents[3]))
from tests.end_to_end.resume import product


def main(strategy_name: str, case: str, directory: str, rank: str, *savers: str) -> None:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    home = pathlib.Path(directory)
    strategy = tfdist.load_strategy(strategy_name.rstrip("0123456789"), start_timeout_seconds=100)
    trainer = product.save(strategy, case, home / strategy_name)
    product.wait_for([home / name for name in savers], 200)
    outcomes = {name: product.go_on(trainer, case, home / name) for name in savers}
    (home / f"{strategy_name}-{rank}.pickle").write_bytes(pickle.dumps(outcomes))
    strategy.group.barrier("done")
    strategy.group.leave()
    strategy.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
