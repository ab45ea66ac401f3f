"""The runs to interrupt: strategies on processes of this host, with the same training."""

import pathlib
import sys
from typing import NamedTuple

STEPS, SAVED_EVERY, COMMIT_EVERY = 120, 7, 3
_TRAINING = (
    "--model=tests.end_to_end.chaos.network:network",
    "--dataset=digits",
    "--batch_size=48",  # 29.9 steps per epoch: epochs begin within batches
    f"--steps={STEPS}",
    "--optimizer=adamw",
    "--warmup_steps=20",
    "--steps_per_call=5",
    f"--checkpoint_every={SAVED_EVERY}",
    "--keep=2",
    "--measure_every=0",
    "--start_timeout_seconds=60",  # how long ranks wait for one that was interrupted before it joined
)
_COMPRESSED = ("--compression=topk(ratio=0.1)", "--compression_min_bytes=64")
_LOCAL = ("--sync=local_sgd(period=8)", *_COMPRESSED)  # checkpoints and commits fall between exchanges
_DILOCO = ("--sync=diloco(period=8)",)
_PIPELINE = ("--strategy=pipeline", "--micro_batches=2", "--activation_compression=int8")
_SERVED = ("--strategy=parameter_server", "--staleness=bounded(0)", "--servers=2")
_SHARDED = ("--strategy=mesh", "--mesh_shape=data:4", "--shard=optimizer", "--shard_min_elements=64")


class Setting(NamedTuple):
    """A strategy and its processes.

    Attributes:
      name: strategy and number of processes.
      processes: number of processes, servers included.
      launcher: `--launcher` of `tfdist launch`.
      flags: flags of `tfdist train`, in addition to the common ones.
      memory: suffix of the directory for in-memory checkpoints. By default each rank has its own, as on separate hosts; empty
        if the engine has no collectives to copy them.
      servers: how many of the processes are parameter servers, the last ones.
    """

    name: str
    processes: int
    launcher: str
    flags: tuple[str, ...]
    memory: str = "-{rank}"
    servers: int = 0

    def train(self, directory: pathlib.Path, *flags: str) -> list[str]:
        """Returns the command of a rank, which TF_CONFIG identifies."""
        return [sys.executable, "-m", "tfdist.train", *_TRAINING, *self.flags, f"--output_dir={directory}", *flags]

    def launch(self, directory: pathlib.Path, *flags: str) -> list[str]:
        """Returns the command that starts all ranks."""
        count = self.processes - self.servers
        own = (f"--processes={count}", f"--launcher={self.launcher}", f"--log_dir={directory}-logs")
        own += (f"--servers={self.servers}",) if self.servers else ()
        return [sys.executable, "-m", "tfdist.launch", *own, "--", *self.train(directory, *flags)]


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("multiworker2", 2, "tensorflow", ("--strategy=multiworker", *_COMPRESSED)),
        Setting("horovod2", 2, "horovod", ("--strategy=horovod", "--communication=gloo", *_COMPRESSED)),
        Setting("horovod3", 3, "horovod", ("--strategy=horovod", "--communication=gloo", *_COMPRESSED)),
        Setting("horovod2_mpi", 2, "horovod", ("--strategy=horovod", "--communication=mpi", *_COMPRESSED)),
        Setting("horovod2_local", 2, "horovod", ("--strategy=horovod", "--communication=gloo", *_LOCAL)),
        Setting("multiworker2_local", 2, "tensorflow", ("--strategy=multiworker", *_LOCAL)),
        Setting("multiworker2_diloco", 2, "tensorflow", ("--strategy=multiworker", *_DILOCO)),
        Setting("pipeline2_tensorflow", 2, "tensorflow", _PIPELINE, ""),
        Setting("pipeline2_horovod", 2, "horovod", (*_PIPELINE, "--communication=gloo"), ""),
        Setting("pipeline2x2", 4, "tensorflow", (*_PIPELINE, "--mesh_shape=stage:2;data:2", *_COMPRESSED), ""),
        # Without staleness, so that the updates are those of a run without interruptions.
        Setting("servers3+2", 5, "tensorflow", _SERVED, "", 2),
        Setting("mesh1x4", 1, "tensorflow", _SHARDED, ""),
        Setting("mesh2x2", 2, "tensorflow", _SHARDED, ""),
    )
}
