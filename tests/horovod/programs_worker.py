"""Runs programs of Horovod's form, one after the other, as one rank, and prints what came of them as one line of JSON each.

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

trained: list[Any] = []  # the variables that the optimizer has last updated
losses: list[float] = []


def observe() -> None:
    """Lets this process remember what an optimizer updates, and the losses of Keras's `fit`."""
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
        if "seed" not in getattr(variable, "path", ""):  # states of random layers are each rank's own
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
        sys.argv, begun = [file.name], time.monotonic()
        runpy.run_path(str(file), run_name="__main__")
        found = {"program": file.stem, "weights": checksum(trained), "losses": losses}
        print("\n" + json.dumps(found | {"seconds": time.monotonic() - begun}), flush=True)


if __name__ == "__main__":
    main()
