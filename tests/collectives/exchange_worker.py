"""One of several ranks that exchange uneven rows.

    python tests/collectives/exchange_worker.py STRATEGY DIRECTORY RANK

DIRECTORY holds cases.pickle: by name the splits [sender, receiver] and for each sender its arrays. Beside it is written what
came, eagerly and of a step that ran twice; under "sums" those of tensors of several dtypes in one call.
"""

import pathlib
import pickle
import sys

import tensorflow as tf

import tfdist

SUMMED = ("float32", "float64", "int32", "float32")


def main(name: str, directory: str, rank: str) -> None:
    strategy = tfdist.load_strategy(name, start_timeout_seconds=60)
    cases = pickle.loads(pathlib.Path(directory, "cases.pickle").read_bytes())

    def exchange() -> dict[str, list[tf.Tensor]]:
        summed = [tf.fill([2], tf.cast(int(rank) + 1, dtype)) for dtype in SUMMED]
        sums = {"sums": strategy.collectives.all_reduce(summed, name="sums")}
        return sums | {
            case: strategy.collectives.all_to_all(
                [tf.constant(array) for array in arrays[int(rank)]], name=case, splits=tf.constant(table[int(rank)])
            )
            for case, (table, arrays) in cases.items()
        }

    compiled = tf.function(lambda: strategy.run(exchange), autograph=False)
    results = [strategy.run(exchange), compiled(), compiled()]
    received = [tf.nest.map_structure(lambda tensor: strategy.local(tensor)[0].numpy(), result) for result in results]
    pathlib.Path(directory, f"{rank}.pickle").write_bytes(pickle.dumps(received))
    strategy.group.barrier("done")
    strategy.group.leave()
    strategy.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
