"""One process of the conformance suite: runs cases under a strategy and writes what came of them.

    python tests/conformance/worker.py STRATEGY FLOATX DIRECTORY RANK

STRATEGY is a name, with options in brackets if it takes any: mesh(mesh_shape='data:4'). DIRECTORY holds cases.pickle, a
list of cases; the outcomes are written beside it.
"""

import pathlib
import pickle
import sys

import keras


def main(strategy_name: str, floatx: str, directory: str, rank: str) -> None:
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(floatx)
    import tfdist
    from tfdist.grammar.spec import parse
    from tfdist.testing import parity

    chosen = parse(strategy_name)
    strategy = tfdist.load_strategy(chosen.name, start_timeout_seconds=60, **chosen.args)
    cases = pickle.loads(pathlib.Path(directory, "cases.pickle").read_bytes())
    outcomes = [parity.run_case(strategy, case) for case in cases]
    pathlib.Path(directory, f"{rank}.pickle").write_bytes(pickle.dumps(outcomes))
    strategy.group.barrier("done")
    strategy.group.leave()
    strategy.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
