"""Creates the weight synchronizer that `--sync` selects."""

from typing import Any

import keras

from tfdist.config.sync import EASGD, FedAvg, HierarchicalLocalSGD, LocalSGD, Sync
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.gradients import Clip
from tfdist.step.compression import Compression
from tfdist.step.state_store import StateStore
from tfdist.step.validation import synchronized_layers
from tfdist.synchronization.elastic_averaging import ElasticSynchronizer
from tfdist.synchronization.federated import FederatedSynchronizer
from tfdist.synchronization.interface import WeightSynchronizer
from tfdist.synchronization.periodic import HierarchicalSynchronizer, PeriodicSynchronizer
from tfdist.synchronization.server_updates import ServerSynchronizer
from tfdist.synchronization.streaming import StreamingSynchronizer

# Synchronizers of the methods that `PeriodicSynchronizer` does not implement.
_SYNCHRONIZERS: dict[type[Sync], Any] = {
    EASGD: ElasticSynchronizer,
    FedAvg: FederatedSynchronizer,
    HierarchicalLocalSGD: HierarchicalSynchronizer,
}


def make_synchronizer(
    sync: Sync, model: keras.Model, strategy: Strategy, compression: Compression, store: StateStore, clip: Clip
) -> WeightSynchronizer:
    """Creates the synchronizer of a compiled and built model; every process must call it.

    Raises:
      InputError: the model communicates in every step, replicas of the strategy cannot train locally, or there are more
        fragments than variables.
    """
    if strategy.remote:
        return ServerSynchronizer(model, strategy, strategy.remote, clip)
    if not sync.exchanges_weights:
        return WeightSynchronizer()
    if not strategy.can_train_locally:
        raise InputError(
            f"Replicas of strategy {strategy.name} cannot train locally, as its engine compiles whole steps. Received: "
            f"sync={sync}. Use sync=every_step, or the strategy mirrored, multiworker or horovod."
        )
    normalization_layers = synchronized_layers(model)
    if normalization_layers:
        raise InputError(
            "Replicas that train locally cannot normalize over all replicas. Received: "
            f"sync={sync} and {normalization_layers[0].path}. Use --batch_norm=local, or --sync=every_step."
        )
    streams = isinstance(sync, LocalSGD) and not sync.is_blocking
    kind: Any = StreamingSynchronizer if streams else _SYNCHRONIZERS.get(type(sync), PeriodicSynchronizer)
    return kind(sync, model, strategy, lambda specs: compression.reducer(specs, {}, ()), store)
