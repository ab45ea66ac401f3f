"""A run as the commands make it: from a configuration to a strategy, data, a model and a trainer."""

import dataclasses
import inspect
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist import data, models
from tfdist.cluster import Cluster
from tfdist.config import TrainConfig
from tfdist.data.pipeline import check_batch_size
from tfdist.detect import Detection, detect
from tfdist.group import Group, watch
from tfdist.keras_objects import create_loss, create_metrics, create_optimizer
from tfdist.loading import start
from tfdist.reporting.environment import versions
from tfdist.strategy import Strategy, strategy_class
from tfdist.trainer import Trainer

# Flags that may differ between the processes of a job: where each finds its data, and how many threads it has.
OWN_FLAGS = ("data_dir", "intra_op_threads", "output_dir")
# Flags that are options of a strategy: each gets those that its constructor takes.
OPTIONS = ("devices", "communication", "intra_op_threads", "tpu")


@dataclasses.dataclass(frozen=True)
class Session:
    """What a command works with: everything is up, nothing is trained yet."""

    config: Any
    detection: Detection
    strategy: Strategy
    data: data.DataSet


def choose(config: TrainConfig, environment: Mapping[str, str] = os.environ) -> Detection:
    """Decides the strategy and this process's place among the job's."""
    gpus = len(tf.config.list_physical_devices("GPU"))
    if config.coordinator:
        environment = {**environment, "TFDIST_COORDINATOR": config.coordinator}
    return detect(environment, config.strategy, config.devices or max(gpus, 1))


@contextmanager
def opened(config: TrainConfig) -> Iterator[Session]:
    """Starts the strategy, checks that all processes have the same flags and versions, and loads the data.

    Whatever ends the session is told to the other processes; if one of them is lost, this one ends with code 5.
    """
    detection = choose(config)
    # Rules between flags that the strategy decides are checked before anything starts.
    config = dataclasses.replace(config, strategy=detection.strategy)
    taken = inspect.signature(strategy_class(detection.strategy)).parameters
    options = {name: getattr(config, name) for name in OPTIONS if name in taken}
    # Watched from when the group is up: an engine that starts may wait for ever for a peer that is lost meanwhile.
    with ExitStack() as watching:

        def watch_over(group: Group, cluster: Cluster) -> None:
            watching.enter_context(watch(group, cluster))

        strategy = start(detection, config.start_timeout_seconds, os.environ, options, watch_over)
        _check_same(config, strategy)
        check_batch_size(config.batch_size, strategy.replicas)
        yield Session(config, detection, strategy, data.load(config.dataset, config.data_dir))
        # Who is done early waits, so that nobody's last collective finds it gone.
        strategy.group.barrier("end", deadline=config.start_timeout_seconds)
    strategy.close()


def make_trainer(session: Session, strategy: Strategy) -> Trainer:
    """Builds the model and the optimizer that the flags name, in a strategy's scope, from the flags' seed."""
    config = session.config
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(config.seed)
    with strategy.scope():
        model = models.build(config.model, *_sizes(session.data))
        if config.batch_norm == "synchronized":
            model = models.with_batch_norm(model, "synchronized")
        return Trainer(
            model,
            optimizer=create_optimizer(config.optimizer, config.learning_rate),
            loss=create_loss(config.loss),
            metrics=create_metrics(config.metrics),
            seed=config.seed,
            jit_compile=config.jit_compile,
        )


def hosts(strategy: Strategy) -> list[str]:
    """The host name of each process, by rank."""
    return strategy.group.gather("hosts", socket.gethostname())


def _check_same(config: TrainConfig, strategy: Strategy) -> None:
    shared = {f"--{k}": v for k, v in dataclasses.asdict(config).items() if k not in OWN_FLAGS}
    strategy.group.agree("flags", shared)
    strategy.group.agree("versions", versions(), "version of ")


def _sizes(whole: data.DataSet) -> tuple[Any, Any]:
    """What a model is built for; a data set that does not know is one for a user's own model, which does not ask."""
    return whole.input_shape, whole.classes
