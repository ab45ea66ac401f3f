"""Runs the example scripts, one after the other, as one rank of a job.

python tests/horovod/examples_worker.py [--without_horovod] FOLDER BASE_RATE [KERAS_FIT_FLAGS...]
"""

import pathlib
import runpy
import sys

EXAMPLES = pathlib.Path(__file__).with_name("examples")


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[0] == "--without_horovod":
        sys.modules["horovod"] = None  # type: ignore[assignment]  # as if it were not installed
        arguments = arguments[1:]
    folder, base_rate, *flags = arguments
    for name in ("keras_fit", "gradient_tape", "synthetic_benchmark"):
        sys.argv = [name, "--floatx=float64", f"--output={folder}/{name}-{{rank}}.npz"]
        sys.argv += [f"--base_rate={base_rate}", *flags] if name == "keras_fit" else []
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


if __name__ == "__main__":
    main()
