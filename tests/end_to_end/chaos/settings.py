"""The runs to interrupt: strategies on processes of this host, with the same training; and the plans of seeds."""

import pathlib
import random
import signal
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
    """A strategy and its processes."""

    name: str
    processes: int  # servers included
    launcher: str  # of `tfdist launch`
    flags: tuple[str, ...]  # of `tfdist train`, in addition to the common ones
    memory: str = "-{rank}"  # of in-memory checkpoints: each rank's own; empty without collectives to copy them
    servers: int = 0  # how many of the processes are parameter servers, the last ones

    def train(self, directory: pathlib.Path, *flags: str) -> list[str]:
        """Returns the command of a rank, which TF_CONFIG identifies."""
        return [sys.executable, "-m", "tfdist.train", *_TRAINING, *self.flags, f"--output_dir={directory}", *flags]

    def launch(self, directory: pathlib.Path, *flags: str) -> list[str]:
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


START, STEP, WRITE, END, MISSED = "start", "step", "write", "end", "missed"
_FIRST = (WRITE, STEP, START, STEP, WRITE)  # by seed, so that a few consecutive seeds have all of them


class Interruption(NamedTuple):
    """One interruption."""

    rank: int
    signal: signal.Signals  # SIGKILL, or SIGTERM as sent by a scheduler
    phase: str  # intended, START, STEP or WRITE; the actual one is observed
    moment: float  # fraction, in [0, 1), of the time to the first step, or of the remaining steps


class Plan(NamedTuple):
    """The plan of one run."""

    launched: bool  # by `tfdist launch`, which supervises the ranks
    interruptions: list[Interruption]  # one for each start of the run except the last
    commits: bool  # whether the run also makes in-memory checkpoints


def plan(name: str, seed: int, processes: int) -> Plan:
    """Returns the plan of a seed for a strategy, the same on every machine."""
    drawn = random.Random(f"{name} {seed}")
    count = drawn.choice((1, 2))
    phases = [_FIRST[seed % len(_FIRST)], drawn.choice(_FIRST)][:count]
    return Plan(
        drawn.random() < 0.5,
        [
            Interruption(
                rank=drawn.randrange(processes),
                signal=drawn.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)),
                phase=phase,
                moment=drawn.random(),
            )
            for phase in phases
        ],
        drawn.random() < 0.5,
    )
