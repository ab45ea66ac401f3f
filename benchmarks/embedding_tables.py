"""An embedding table larger than a worker: memory of all processes, and bytes that workers pull and push.

    python benchmarks/embedding_tables.py --gib=4 --limit_gib=2                  # as root, with 17 GiB of free memory
    python benchmarks/embedding_tables.py --gib=1 --limit_gib=0.7 --checkpoint   # and saves the table

Two workers and two servers of `tfdist launch` train a table of that size with AdamW, whose slots are twice as large, with lazy
updates. Each worker is in a control group of its own (cgroup v1) with limited memory: it would be killed if it had the table.
The keys of a batch are long-tailed. Needed are the bytes of the distinct rows of each batch and of the dense weights, twice.
"""

import argparse
import atexit
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

GROUPS = pathlib.Path("/sys/fs/cgroup/memory")
WIDTH, FIELDS = 64, 26


def peak_gib() -> float:
    """Returns the largest resident memory of this process so far."""
    [kib] = re.findall(r"VmHWM:\s*(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    return int(kib) / 2**20


def train(rows: int, batch_size: int, steps: int, checkpoint: str) -> None:
    """Runs in each process."""
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    name = f"{'server' if task['type'] == 'ps' else 'worker'} {task['index']}"
    atexit.register(lambda: print(f"{name}: at most {peak_gib():.2f} GiB resident", flush=True))
    if task["type"] != "ps":
        (GROUPS / os.environ["GROUP"] / str(task["index"]) / "cgroup.procs").write_text(str(os.getpid()))

    import keras
    import numpy as np

    import tfdist
    from tfdist.coordination.calls import Connection, encode

    sizes: dict[str, int] = {}
    begin = Connection.begin

    def counted(self: Any, calls: Any, seconds: float | None = None) -> Any:
        answers = begin(self, calls, seconds)

        def received() -> Any:
            for (method, message), answer in zip(calls, answers(), strict=True):
                parts = [*encode(message), *encode(answer)]
                sizes[method] = sizes.get(method, 0) + sum(map(len, parts))
                yield answer

        return received

    started = time.perf_counter()
    strategy = tfdist.load_strategy("parameter_server", staleness="async", sparse_updates="lazy")
    Connection.begin = counted  # type: ignore[method-assign]
    with strategy.scope():
        inputs = keras.Input((FIELDS,), dtype="int64")
        x = keras.layers.Flatten()(keras.layers.Embedding(rows, WIDTH, name="table")(inputs))
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(16, activation="relu")(x)))
        trainer = tfdist.Trainer(model, optimizer=keras.optimizers.AdamW(), loss="mse")
    random = np.random.default_rng(0)
    keys = np.minimum(rows ** random.random((steps * batch_size, FIELDS)), rows - 1).astype(np.int64) * 7919 % rows
    data = keys, random.random((len(keys), 1)).astype(np.float32)
    trainer.build(data)
    print(f"{name}: {strategy.remote.description}; created after {time.perf_counter() - started:.0f} s", flush=True)
    ids, needed = strategy.remote.tables.ids, [0]
    dense = sum(v.numpy().nbytes for v in model.trainable_variables if "table" not in v.path)

    def counted_ids(batch: Any) -> Any:
        found = ids(batch)
        needed[0] += 2 * (4 * WIDTH * len(found[0]) + dense)
        return found

    strategy.remote.tables.ids = counted_ids
    sizes.clear()
    options = tfdist.Checkpoints(directory=checkpoint, every=steps) if checkpoint else None
    trainer.fit(*data, batch_size=batch_size, steps=steps, verbose=0, checkpoints=options)
    sent = sizes["pull"] + sizes["push"]
    largest = GROUPS / os.environ["GROUP"] / str(task["index"]) / "memory.max_usage_in_bytes"
    print(
        f"{name}: pulled and pushed {sent / 2**20:.1f} MiB, {sent / needed[0]:.3f} of the needed {needed[0] / 2**20:.1f} MiB; "
        f"its control group at most {int(largest.read_text()) / 2**30:.2f} GiB",
        flush=True,
    )
    if checkpoint and strategy.is_chief:
        saved = sum(file.stat().st_size for file in pathlib.Path(checkpoint).rglob("*.safetensors"))
        print(f"{name}: saved {saved / 2**30:.2f} GiB", flush=True)


def main() -> None:
    """Starts the job; each worker joins its control group."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0, help="size of the table")
    parser.add_argument("--limit_gib", type=float, default=2.0, help="memory of a worker")
    parser.add_argument("--batch_size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--checkpoint", action="store_true", help="save the run at its end")
    options = parser.parse_args()
    rows = int(options.gib * 2**30) // (4 * WIDTH)
    if "GROUP" in os.environ:
        train(rows, options.batch_size, options.steps, os.environ["CHECKPOINT"])
        return
    group = GROUPS / f"tfdist-{os.getpid()}"
    limits = [group / str(number) for number in range(2)]
    for limit in (group, *limits):
        limit.mkdir()
    for limit in limits:
        (limit / "memory.limit_in_bytes").write_text(str(int(options.limit_gib * 2**30)))
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = f"{directory}/checkpoints" if options.checkpoint else ""
        environment = {**os.environ, "GROUP": group.name, "CHECKPOINT": checkpoint, "TMPDIR": directory}
        launch = [sys.executable, "-m", "tfdist.launch", "--processes=2", "--servers=2", "--", sys.executable]
        try:
            sys.exit(subprocess.run([*launch, *sys.argv], env=environment, check=False).returncode)
        finally:
            for limit in (*limits, group):
                limit.rmdir()


if __name__ == "__main__":
    main()
