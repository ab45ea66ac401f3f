"""Runs programs that use Horovod's API one after another, as one rank, and prints each one's results as a line of JSON.

python tests/horovod/programs_worker.py FOLDER FILE...
"""

import hashlib
import json
import os
import pathlib
import runpy
import sys
import time
from typing import Any

import keras

trained: list[Any] = []  # variables of the optimizer's last update
losses: list[float] = []


def observe() -> None:
    """Records the variables that an optimizer updates, and the losses of Keras's `fit`."""
    apply, fit = keras.Optimizer.apply, keras.Model.fit

    def remembered(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        trained[:] = list(trainable_variables or [])
        return apply(self, grads, trainable_variables)

    def followed(self: Any, *args: Any, **kwargs: Any) -> Any:
        history = fit(self, *args, **kwargs)
        losses.extend(history.history["loss"])
        trained[:] = self.variables
        return history

    keras.Optimizer.apply, keras.Model.fit = remembered, followed


def checksum(variables: list[Any]) -> str:
    digest = hashlib.sha256()
    for variable in variables:
        if "seed" not in getattr(variable, "path", ""):  # states of random layers differ between ranks
            digest.update(variable.numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    folder, *files = sys.argv[1:]
    observe()
    for file in map(pathlib.Path, files):
        directory = pathlib.Path(folder, file.stem)
        directory.mkdir(parents=True, exist_ok=True)
        os.chdir(directory)
        trained.clear()
        losses.clear()
        # Of each rank its own, as without one; but the same in each run, so that losses fall in all or in none.
        keras.utils.set_random_seed(1 + int(os.environ["HOROVOD_RANK"]))
        sys.argv, begun = [file.name], time.monotonic()
        runpy.run_path(str(file), run_name="__main__")
        found = {"program": file.stem, "weights": checksum(trained), "losses": losses}
        print("\n" + json.dumps(found | {"seconds": time.monotonic() - begun}), flush=True)


if __name__ == "__main__":
    main()
