"""Write the predictions of a run's model for its dataset or another one, with any strategy."""

import csv
import io
import sys
from typing import TYPE_CHECKING, Any

from tfdist.cli import command, weights
from tfdist.cluster.quiet_tensorflow import load_tensorflow
from tfdist.config.trained_config import PredictConfig
from tfdist.errors import InputError
from tfdist.storage import path_of

if TYPE_CHECKING:
    import numpy as np

    from tfdist.data.examples import Origins


def main(run: str, config: PredictConfig) -> int:
    """Writes the predictions and prints their path; returns the exit code."""
    weights.weight_files(run, config.checkpoint)  # reports errors before TensorFlow is loaded
    if config.output:
        weights.check_output(config.output)
    load_tensorflow()  # imported late, after parsing flags
    from tfdist.cli.trained_run import open_run

    with open_run(run, config) as trained_run:
        is_chief = trained_run.trainer.strategy.is_chief
        verbose = 1 if is_chief and sys.stdout.isatty() else 0
        examples = trained_run.examples(config.split)
        outputs = trained_run.trainer.predict(examples, batch_size=trained_run.batch_size, verbose=verbose)
        if is_chief:
            arrays = _arrays_by_name(outputs)
            if config.classes:
                arrays = {name: _classes(name, values) for name, values in arrays.items()}
            step_suffix = "" if trained_run.step is None else f"-{trained_run.step:09d}"
            default = trained_run.directory / f"predictions{step_suffix}{'.npy' if len(arrays) == 1 else '.npz'}"
            path = path_of(config.output) if config.output else default
            weights.write_output(
                path, _contents(arrays, f".{path.name.rpartition('.')[2]}", str(path), examples.origins)
            )
            shapes = ", ".join(f"{name} {list(values.shape)}".lstrip() for name, values in arrays.items())
            print(f"{path}  {shapes}  {trained_run.data.name}, {config.split}, from {trained_run.source}")
    return 0


def _arrays_by_name(outputs: Any) -> dict[str, "np.ndarray"]:
    """Returns the arrays of a structure of outputs by name; a single output has the name ""."""
    import tensorflow as tf

    leaves = tf.nest.flatten(outputs)
    if isinstance(outputs, dict):
        return {name: values for name, values in zip(sorted(outputs), leaves, strict=True)}
    return {"": leaves[0]} if len(leaves) == 1 else {f"output_{i}": values for i, values in enumerate(leaves)}


def _classes(name: str, values: "np.ndarray") -> "np.ndarray":
    if values.ndim < 2 or values.shape[-1] < 2:
        raise InputError(
            f"--classes needs an output for each class. Received: {name or 'an output'} of shape {list(values.shape)}. "
            "Remove --classes."
        )
    return values.argmax(axis=-1)


def _contents(arrays: dict[str, "np.ndarray"], ending: str, path: str, origins: "Origins | None") -> bytes:
    """Returns the contents of a file with a row per example; .csv and .npz include known names of examples."""
    import numpy as np

    if ending != ".npz" and len(arrays) > 1:
        raise InputError(
            f"A model with several outputs needs --output=NAME.npz. Received: {path} and {', '.join(arrays)}."
        )
    file = io.BytesIO()
    [first_array, *_] = arrays.values()
    if ending == ".npy":
        np.save(file, first_array, allow_pickle=False)
    elif ending == ".npz":
        arrays_by_name: dict[str, Any] = {name or "predictions": values for name, values in arrays.items()}
        # The plural, because `savez_compressed` has an argument `file`.
        names = {} if origins is None else {f"{origins.kind}s": np.asarray(origins.names)}
        np.savez_compressed(file, **names | arrays_by_name)
    else:
        rows = first_array.reshape(len(first_array), -1)
        is_class = rows.dtype.kind in "iu"
        outputs = ["prediction"] if rows.shape[1] == 1 else [f"output_{i}" for i in range(rows.shape[1])]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["example", *([origins.kind] if origins else []), *outputs])
        for index, row in enumerate(rows):
            name = [origins.names[index]] if origins else []
            writer.writerow([index, *name, *(int(value) if is_class else repr(value.item()) for value in row)])
        file.write(text.getvalue().encode("utf-8", "surrogateescape"))
    return file.getvalue()


_EXAMPLES = (
    "tfdist predict runs/one --output=predictions.npy",
    "tfdist predict runs/one --classes --output=classes.csv --strategy=mirrored --devices=2",
)

if __name__ == "__main__":
    sys.exit(command.run("predict", PredictConfig, main, about=__doc__, arguments="RUN", examples=_EXAMPLES))
