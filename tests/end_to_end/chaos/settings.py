"""What is run: a strategy on processes of this host, and the training that all of them share."""

import pathlib
import sys
from typing import NamedTuple

STEPS, SAVED_EVERY, COMMIT_EVERY = 120, 7, 3
_TRAINING = (
    "--model=tests.end_to_end.chaos.network:network",
    "--dataset=digits",
    "--batch_size=48",  # 29.9 steps an epoch: epochs begin inside of batches
    f"--steps={STEPS}",
    "--optimizer=adamw",
    "--warmup_steps=20",
    "--steps_per_call=5",
    f"--checkpoint_every={SAVED_EVERY}",
    "--keep=2",
    "--measure_every=0",
    "--start_timeout_seconds=60",  # which the others wait for a rank that was struck before it came
)
_COMPRESSED = ("--compression=topk(ratio=0.1)", "--compression_min_bytes=64")
_SHARDED = ("--strategy=mesh", "--mesh_shape=data:4", "--shard=optimizer", "--shard_min_elements=64")


class Setting(NamedTuple):
    """One strategy of the harness.

    Attributes:
      name: of the strategy and its processes.
      processes: how many.
      launcher: of `tfdist.launch`.
      flags: of `tfdist.train`, beside those that all share.
      memory: ends the name of the directory for commits, which each rank has for itself, as on a host of its own, unless its
        engine has no collectives that could carry them.
    """

    name: str
    processes: int
    launcher: str
    flags: tuple[str, ...]
    memory: str = "-{rank}"

    def train(self, directory: pathlib.Path, *flags: str) -> list[str]:
        """The command of one rank, whose TF_CONFIG says who it is."""
        return [sys.executable, "-m", "tfdist.train", *_TRAINING, *self.flags, f"--output_dir={directory}", *flags]

    def launch(self, directory: pathlib.Path, *flags: str) -> list[str]:
        """The command that starts all ranks."""
        own = (f"--processes={self.processes}", f"--launcher={self.launcher}", f"--log_dir={directory}-logs")
        return [sys.executable, "-m", "tfdist.launch", *own, "--", *self.train(directory, *flags)]


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("multiworker2", 2, "tensorflow", ("--strategy=multiworker", *_COMPRESSED)),
        Setting("horovod2", 2, "horovod", ("--strategy=horovod", *_COMPRESSED)),
        Setting("horovod3", 3, "horovod", ("--strategy=horovod", *_COMPRESSED)),
        Setting("mesh1x4", 1, "tensorflow", _SHARDED, ""),
        Setting("mesh2x2", 2, "tensorflow", _SHARDED, ""),
    )
}
