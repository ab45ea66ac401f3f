"""Memory of one device in training steps, by its process's peak beyond what was there before them.

    python benchmarks/memory.py --model="transformer(layers=2,width=64)" --dataset="text(length=1024)" --batch_size=1
    tfdist launch --processes=4 -- python benchmarks/memory.py --strategy=mesh --mesh_shape=... --layout=...

Takes the flags of `tfdist train`. One device a process; each prints a line. `building` is the peak while the model
and the optimizer's slots are made, `steps` that of three steps, `state` what parameters and slots take of a device's
memory. On Linux alone.
"""

import pathlib
import sys

import psutil
import tensorflow as tf

from tfdist import keras_internals
from tfdist.cli import command, flags, run
from tfdist.config.train_config import TrainConfig
from tfdist.trainer.options import Checks, Schedule

STEPS = 3
MIB = 2**20


def main(config: TrainConfig) -> None:
    """Trains for some steps, and prints what they took."""
    with run.open_session(config) as session:
        start = _now()
        _forget_the_peak()
        trainer = run.make_trainer(session, session.strategy)
        trainer.build(session.data.train)
        building, built = _peak() - start, _now()
        _forget_the_peak()
        trainer.fit(
            session.data.train,
            batch_size=config.batch_size,
            steps=STEPS,
            schedule=Schedule(steps_per_call=1),
            checks=Checks(measure_every=0),
        )
        state = sum(_bytes(v) for v in (*trainer.model.variables, *trainer.model.optimizer.variables))
        print(
            f"rank {session.strategy.cluster.rank}: building {building / MIB:.0f} MiB, "
            f"steps {(_peak() - built) / MIB:.0f} MiB, state {state / MIB:.0f} MiB",
            flush=True,
        )


def _bytes(variable: object) -> int:
    """Of this device's part."""
    value = tf.convert_to_tensor(keras_internals.value_of(variable))
    parts = tf.experimental.dtensor.unpack(value) if tf.experimental.dtensor.is_dtensor(value) else [value]
    return parts[0].shape.num_elements() * parts[0].dtype.size


def _now() -> int:
    return psutil.Process().memory_info().rss


def _peak() -> int:
    [line] = [line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def _forget_the_peak() -> None:
    pathlib.Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    sys.exit(command.run("train", flags.define, lambda values: main(flags.config(values))))
