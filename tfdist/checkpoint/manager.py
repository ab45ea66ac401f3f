"""Saves a run in the background, periodically and on preemption, at the same step on all processes."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from tfdist.checkpoint.best import BestTracker, checkpoint_of
from tfdist.checkpoint.format import LockError, complete_checkpoints, lock, step_of
from tfdist.checkpoint.replication import DurableTier, InMemoryTier, RunSnapshot, Tier
from tfdist.cluster.gce_notice import machine_notices
from tfdist.cluster.signals import CTRL_C, termination_notices
from tfdist.config.monitor import Interval, parse_interval, parse_monitor
from tfdist.coordination import Group
from tfdist.coordination.group import LONG_SECONDS
from tfdist.coordination.sync_points import SyncPoints
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError, Interrupted, Preempted
from tfdist.storage import path_of, storage_of

_PREEMPTED, _DUE, _WRITE_FAILED = "preempted", "checkpoint", "checkpoint failed"  # topics of sync points

_log = logging.getLogger(__name__)

MAX_IN_MEMORY_CHECKPOINTS = 2  # the older one is used if the newer one is corrupted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Options for saving a run.

    A run with checkpoints stops when any of its processes receives SIGTERM or SIGINT: all processes save at the same step,
    and `fit` raises `tfdist.errors.Preempted`.

    In-memory checkpoints (commits) protect against the failure of a process, or of one of several hosts. If
    `commit_directory` is in memory, such as /dev/shm, they can be frequent. The newest two are kept. If writing one fails,
    a warning is logged.

    Attributes:
      directory: path or URL that all hosts share; a subdirectory `step-...` is created in it for each checkpoint. Only one
        run may save there at a time: a second run fails with the host, process and time of the first.
      every: interval in steps, such as 500 or "500", or in seconds, such as "600s"; "0" saves only on preemption.
      keep: number of newest checkpoints to keep.
      best: metric to track, such as "val_accuracy" or "val_auc(mode=max)", with Keras's names: metrics of an evaluation
        have the prefix `val_`, other metrics are of an epoch. The run is also saved whenever the value improves, and at
        its end. The best checkpoint is kept in addition to the newest ones; see `Trainer.load_best`.
      in_background: whether training continues while a checkpoint is written, after a copy to host memory; if False,
        training waits, and on CPUs no memory for the copy is needed.
      strict: whether the run ends if writing a checkpoint fails; if False, a warning is logged, and the run continues.
      flags: flags of the run, stored in each checkpoint for information.
      commit_every: number of steps between in-memory checkpoints; 0 for none.
      commit_directory: directory for the in-memory checkpoints of this run only. If each host has its own directory, data
        that only one process has is also sent to the next host. In-memory checkpoints are removed when the run has
        finished and a checkpoint of its last step exists.
    """

    directory: str
    every: str = "0"
    keep: int = 3
    best: str = ""
    in_background: bool = True
    strict: bool = True
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    commit_every: int = 0
    commit_directory: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", str(self.every))  # may be an int
        _ = self.interval  # validates it
        if not self.directory:
            raise InputError('Checkpoints need a directory. Received: "". Pass a path, such as directory="runs/one".')
        if self.keep < 1:
            raise InputError(f"keep must be at least 1. Received: keep={self.keep}. The default is 3.")
        if self.best:
            parse_monitor(self.best)
        if self.commit_every < 0 or bool(self.commit_every) != bool(self.commit_directory):
            raise InputError(
                "In-memory checkpoints need an interval and a directory: specify both commit_every (at least 1) and "
                "commit_directory, or neither. Received: "
                f"commit_every={self.commit_every}, commit_directory={self.commit_directory!r}."
            )
        paths = {storage_of(path).real_path(path_of(path)) for path in (self.commit_directory, self.directory)}
        if self.commit_directory and len(paths) == 1:
            raise InputError(
                "In-memory and durable checkpoints need different directories, because old checkpoints in each are removed "
                f"independently. Received for both: {self.directory}. Specify another commit_directory."
            )

    @property
    def interval(self) -> Interval:
        """The parsed value of `every`."""
        return parse_interval(self.every)


class Saver:
    """Saves a run between calls of the compiled loop; the base class saves nothing."""

    def next_step(self, step: int) -> int | None:
        """Returns the next step at which a call of the compiled loop must end; None if there is no constraint."""
        return None

    def begin(self, end: int) -> None:
        """Records the start of a call of the compiled loop that ends at step `end`."""

    def observe(self, step: int, logs: Mapping[str, float]) -> None:
        """Observes the results of an evaluation or an epoch; called before `save_if_due` of the step."""

    def save_if_due(self, step: int, is_last: bool = False) -> None:
        """Saves the run if it is due; called at the end of a step, with `is_last` at the end of the run.

        Raises:
          Preempted: the run must stop, and has been saved.
          CheckpointError: saving failed.
        """


@dataclasses.dataclass
class _PeriodicSaver(Saver):
    options: Checkpoints
    strategy: Strategy
    sync_points: SyncPoints
    take_snapshot: Callable[[], RunSnapshot]
    flush: Callable[[], object]
    best: BestTracker | None
    notices: Collection[str]

    def __post_init__(self) -> None:
        options, self._group, self._interval = self.options, self.strategy.group, self.options.interval
        self._step_intervals = [steps for steps in (self._interval.steps, options.commit_every) if steps]
        self._durable_tier = DurableTier(
            self._group,
            options.directory,
            options.keep,
            options.flags,
            strict=options.strict,
            on_failure=lambda: self.sync_points.request(_WRITE_FAILED),
        )
        self._in_memory_tier: InMemoryTier | None = None
        if options.commit_every:
            self._in_memory_tier = InMemoryTier(
                self.strategy, options.commit_directory, MAX_IN_MEMORY_CHECKPOINTS, options.flags
            )
        self._step = -1  # the last step for which `save_if_due` was called
        self._last_request = time.monotonic()

    def next_step(self, step: int) -> int | None:
        return min((step - step % every + every for every in self._step_intervals), default=None)

    def begin(self, end: int) -> None:
        self.sync_points.begin(end)

    def observe(self, step: int, logs: Mapping[str, float]) -> None:
        if self.best:
            self.best.observe(step, logs)

    def save_if_due(self, step: int, is_last: bool = False) -> None:
        self._step = step
        requests = self.sync_points.end_call(step)
        if _WRITE_FAILED in requests:
            self._durable_tier.wait()
        is_periodic = self._interval.steps and step % self._interval.steps == 0
        is_enabled = bool(self._interval.steps or self._interval.seconds or self.best)
        is_best = self.best is not None and self.best.best is not None and self.best.best.step == step
        is_durable = is_periodic or is_best or _DUE in requests or _PREEMPTED in requests or (is_last and is_enabled)
        is_in_memory = self._in_memory_tier and step % self.options.commit_every == 0
        # The in-memory checkpoint is written first, because it is faster.
        tiers = [self._in_memory_tier if is_in_memory else None, self._durable_tier if is_durable else None]
        self._save([tier for tier in tiers if tier and tier.last_step != step])
        if _PREEMPTED in requests:
            self._durable_tier.wait(strict=True)
            kind = Interrupted if CTRL_C in self.notices else Preempted
            raise kind(
                f"{kind.__name__}: saved at step {step} in {self._durable_tier.directory}. Resume with the same command and "
                "the same --output_dir."
            )
        seconds = self._interval.seconds
        if seconds and self._group.rank == 0 and time.monotonic() - self._last_request >= seconds:
            self._last_request = time.monotonic()
            self.sync_points.request(_DUE)

    def finish(self) -> None:
        self._durable_tier.wait()
        if self._in_memory_tier:
            self._in_memory_tier.wait()
            if self._durable_tier.last_step == self._step:
                self._in_memory_tier.clear()

    def wait_ignoring_errors(self) -> None:
        """Waits for all writes, ignoring their errors because another error is being raised."""
        self._durable_tier.wait_ignoring_errors()
        if self._in_memory_tier:
            self._in_memory_tier.wait_ignoring_errors()

    def _save(self, tiers: Sequence[Tier]) -> None:
        """Copies the state once, and starts writing it after all processes have completed the previous writes."""
        if not tiers:
            return
        for tier in tiers:
            tier.wait()
        if self.best:  # an in-memory checkpoint must not refer to a best checkpoint that is incomplete
            self._durable_tier.wait()
        snapshot = self.take_snapshot()
        if self._durable_tier in tiers or (self._in_memory_tier and self._in_memory_tier.survives_host_loss):
            self.flush()
        for tier in tiers:
            tier.start(snapshot)
        if not self.options.in_background:
            for tier in tiers:
                tier.wait()


@contextlib.contextmanager
def open_saver(
    options: Checkpoints | None,
    strategy: Strategy,
    step: int,
    take_snapshot: Callable[[], RunSnapshot],
    flush: Callable[[], object],
    best: BestTracker | None = None,
) -> Iterator[Saver]:
    """Yields the `Saver` of a run; all writes are complete when the context exits.

    Args:
      options: options for saving; None for a run without checkpoints.
      strategy: strategy of the run.
      step: number of completed updates.
      take_snapshot: returns the current state, copied to the host; called on every process.
      flush: flushes to disk the data that belongs to a checkpoint but is stored elsewhere. Not called for an in-memory
        checkpoint on a single host, because written data survives the process even if it is not flushed.
      best: tracker of the metric `options.best`, if there is one.

    Raises:
      InputError: on all ranks, if another run saves to the directory, or has left checkpoints of later steps there.
    """
    if options is None:
        yield Saver()
        return
    received_notices: list[str] = []

    def record(name: str) -> None:
        received_notices.append(name)
        sync_points.request(_PREEMPTED)

    with (
        _reserve(options, strategy.group, step),
        SyncPoints(strategy.group) as sync_points,
        termination_notices(record),
        machine_notices(lambda _: sync_points.request(_PREEMPTED)),
    ):
        _clear_missing_best(best, strategy.group)
        saver = _PeriodicSaver(options, strategy, sync_points, take_snapshot, flush, best, received_notices)
        try:
            yield saver
        except BaseException:
            saver.wait_ignoring_errors()
            raise
        saver.finish()


def _clear_missing_best(best: BestTracker | None, group: Group) -> None:
    """Clears the best value if its checkpoint is not in this directory, as when another run is resumed here."""
    if best is None or best.best is None:
        return
    exists = group.rank == 0 and checkpoint_of(best.best, best.directory) is not None
    if not group.broadcast("checkpoints/best", exists, LONG_SECONDS):
        if group.rank == 0:
            _log.info(
                "The best value so far, %s, has no checkpoint in %s, so only later steps can become the best.",
                best.best,
                best.directory,
            )
        best.best = None


@contextlib.contextmanager
def _reserve(options: Checkpoints, group: Group, step: int) -> Iterator[None]:
    """Reserves the directory of checkpoints for this run; if the chief fails, all ranks raise its error."""
    with contextlib.ExitStack() as stack:
        error_message = ""
        if group.rank == 0:
            directory = path_of(options.directory)
            with contextlib.suppress(OSError):  # if it cannot be created, the first write reports the error
                storage_of(directory).make_directory(directory)
            try:
                stack.enter_context(lock(directory, "specify another directory"))
            except LockError as error:
                _log.warning("%s Another run could write there at the same time.", error)
            except InputError as error:
                error_message = str(error)
            for path in filter(None, (options.directory, options.commit_directory)):
                checkpoints = complete_checkpoints(path)
                # A later checkpoint would count as this run's newest and displace its own.
                if not error_message and checkpoints and step_of(checkpoints[0]) > step:
                    error_message = (
                        f"A run that starts at step {step} needs a checkpoint directory without checkpoints of later "
                        f"steps. Received: {checkpoints[0]}. Specify another directory, or call trainer.resume first."
                    )
        if error_message := group.broadcast("checkpoints/claimed", error_message, LONG_SECONDS):
            raise InputError(error_message)
        yield
