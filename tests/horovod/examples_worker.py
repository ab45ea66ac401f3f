"""Runs the example scripts one after another, as one rank of a job, or for a learning rate as if there were SIZE ranks.

python tests/horovod/examples_worker.py FOLDER BASE_RATE [SIZE]
"""

import pathlib
import runpy
import sys

from tfdist.horovod import callbacks

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "horovod"


def main() -> None:
    folder, base_rate, *size = sys.argv[1:]
    if size:
        callbacks.size = lambda: int(size[0])
    for name in ("keras_fit", "gradient_tape", "synthetic_benchmark"):
        sys.argv = [name, "--floatx=float64", f"--output={folder}/{name}-{{rank}}.npz"]
        sys.argv += [f"--base_rate={base_rate}"] if name == "keras_fit" else []
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


if __name__ == "__main__":
    main()
