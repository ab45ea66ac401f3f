"""One process of a job started by a test: runs a worker on a strategy, then ends together with the others.

    python tests/workers/main.py WORKER STRATEGY DIRECTORY [ARGUMENTS...]

WORKER is a module in this directory. The result of its `work(strategy, directory, *arguments)` is written to
DIRECTORY/RANK.pickle. STRATEGY is a name, optionally with options in parentheses: mesh(mesh_shape='data:4').
"""

import importlib
import pathlib
import pickle
import sys

import tfdist
from tfdist.config.spec import parse


def main(worker: str, strategy_name: str, directory: str, *arguments: str) -> None:
    sys.path[0] = str(pathlib.Path(__file__).parents[2])  # instead of this directory, whose names are not unique
    module = importlib.import_module(f"tests.workers.{worker}")
    chosen, folder = parse(strategy_name), pathlib.Path(directory)
    strategy = tfdist.load_strategy(chosen.name, start_timeout_seconds=100, **chosen.args)
    outcome = module.work(strategy, folder, *arguments)
    (folder / f"{strategy.cluster.rank}.pickle").write_bytes(pickle.dumps(outcome))
    strategy.group.barrier("done")
    strategy.group.leave()
    strategy.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
