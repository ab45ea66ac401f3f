"""Divides examples among virtual clients for federated averaging; in each round, some of the clients train."""

import itertools
from typing import Any, NamedTuple, Self

import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.config.sync import FedAvg
from tfdist.data.examples import Element, Examples, Transform, WrappedExamples
from tfdist.data.row_partition import IndexedBatch, RowPartition, row_range
from tfdist.data.source import Source
from tfdist.errors import InputError

# Random numbers are raw integers of NumPy's bit generators, the same in every version and on every machine.

_SPLIT, _SHARDS, _CLIENTS, _BATCHES = range(1, 5)  # what random numbers are used for


class Clients:
    """The division of a dataset among clients, a pure function of the seed.

    Attributes:
      examples: ascending indices of each client's examples.
    """

    def __init__(self, sync: FedAvg, size: int, seed: int, shuffle: bool = True, labels: np.ndarray | None = None):
        """Divides `size` examples; raises `InputError` if there are too few.

        With `shuffle`, a client's examples are shuffled in each of its epochs. `labels`, [size], are the classes of the
        examples; required if `sync.shards_per_client` is set.
        """
        shards = max(1, sync.shards_per_client)
        if sync.clients * shards > size:
            per_shard = f" in each of its {shards} shards" if shards > 1 else ""
            raise InputError(
                f"Every client needs an example{per_shard}. Received: sync={sync} and {size} examples. Use fewer clients."
            )
        self._sync, self._seed, self._shuffle = sync, seed % 2**64, shuffle
        self.examples = self._divide(size, shards, labels)

    def sample_clients(self, round_index: int) -> list[int]:
        """Returns the clients that train in a round."""
        order = _permutation(self._sync.clients, self._seed, _CLIENTS, round_index)
        return [int(client) for client in order[: self._sync.clients_per_round]]

    def allocate(self, round_index: int, replicas: int) -> list[list[int]]:
        """Returns the clients that each replica trains in a round, so that replicas have similar numbers of examples.

        Clients are assigned in order of decreasing size, each to the replica with the fewest examples so far.
        """
        clients_by_replica: list[list[int]] = [[] for _ in range(replicas)]
        counts = [0] * replicas
        for client in sorted(self.sample_clients(round_index), key=lambda c: (-len(self.examples[c]), c)):
            replica = counts.index(min(counts))
            clients_by_replica[replica].append(client)
            counts[replica] += len(self.examples[client])
        return clients_by_replica

    def batches(self, round_index: int, client: int, batch_size: int) -> list[np.ndarray]:
        """Returns the indices of the examples of a client's batches in a round: a function of seed, round and client."""
        indices, batches = self.examples[client], []
        for epoch in range(self._sync.local_epochs):
            key = (self._seed, _BATCHES, round_index, client, epoch)
            order = indices[_permutation(len(indices), *key)] if self._shuffle else indices
            batches += [order[start : start + batch_size] for start in range(0, len(indices), batch_size)]
        return batches

    def _divide(self, size: int, shards: int, labels: np.ndarray | None) -> list[np.ndarray]:
        order = _permutation(size, self._seed, _SPLIT)
        if labels is not None:
            order = order[np.argsort(labels[order], kind="stable")]
        shard_sizes = [n for count in _client_sizes(self._sync, size, shards) for n in _even_parts(count, shards)]
        # The shards, in random order, are consecutive pieces of the sorted examples.
        shard_order = _permutation(len(shard_sizes), self._seed, _SHARDS)
        pieces = np.split(order, np.cumsum([shard_sizes[shard] for shard in shard_order])[:-1])
        by_shard = [pieces[position] for position in np.argsort(shard_order)]
        return [np.sort(np.concatenate(by_shard[i : i + shards])) for i in range(0, len(by_shard), shards)]


def _client_sizes(sync: FedAvg, size: int, minimum: int) -> list[int]:
    if sync.client_sizes == "equal":
        return _even_parts(size, sync.clients)
    weights = np.cumsum(1 / np.arange(1, sync.clients + 1))
    extra_examples = size - minimum * sync.clients
    ends = np.floor(weights / weights[-1] * extra_examples).astype(np.int64)
    return [minimum + int(count) for count in np.diff(ends, prepend=0)]


def _even_parts(total: int, parts: int) -> list[int]:
    return [row_range(total, part, parts)[1] for part in range(parts)]


def _permutation(count: int, *key: int) -> np.ndarray:
    """Returns a random permutation of range(count), int64 [count]: a function of `key`, non-negative integers."""
    random_values = np.random.PCG64(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(random_values, kind="stable").astype(np.int64)


_LABEL_BATCH_SIZE = 1024


class ClientBatch(NamedTuple):
    """A client's batch, on which one replica trains in one local step of a round."""

    # (x, y) or (x, y, sample_weight); only the first example of the data if the replica has no more clients.
    batch: Any
    rows: tf.Tensor  # scalar int32; number of counted rows, 0 if the replica has no more clients
    client: tf.Tensor  # scalar int64; index of the client
    batch_index: tf.Tensor  # scalar int64; index of the batch among the client's batches in this round
    begins_client: tf.Tensor  # scalar bool; whether this is the client's first batch in the round
    ends_client: tf.Tensor  # scalar bool; whether this is the client's last batch in the round
    client_examples: tf.Tensor  # scalar int64; number of examples of the client
    ends_round: tf.Tensor  # scalar bool; whether the round ends with this local step, the same on all replicas


class ClientExamples(WrappedExamples):
    """Examples of a source, divided among clients.

    Batch k of `indexed_batches` is round k: one `ClientBatch` per replica for each local step. All replicas have the same
    number of local steps; a replica whose clients are done has no counted rows. Every process plans the whole round.
    """

    def __init__(self, source: Examples, sync: FedAvg, batch_size: int, seed: int):
        """Divides the examples; reads all labels if `sync.shards_per_client` is set.

        A client's batches have `batch_size` rows; the last batch of an epoch may be short.

        Raises:
          InputError: the examples have no random access, required labels are missing, or there are too few examples.
        """
        if not isinstance(source, Source):
            raise InputError(
                "Clients need data with random access, without augmentations and steps_per_epoch. Received: "
                f"sync={sync} and {type(source).__name__}. Pass arrays, or a dataset whose examples can be read by index."
            )
        super().__init__(source, source.size)
        self._source = source
        self._batch_size = batch_size
        labels = _labels(self._source, sync) if sync.shards_per_client else None
        self._clients = Clients(sync, source.size, seed, source._shuffle, labels)
        self.batch_text = (
            f"{sync.clients_per_round} of {sync.clients} clients per step, about "
            f"{sync.examples_per_step(source.size, batch_size):,} examples in batches of {batch_size}"
        )

    def preview(self, rows: int) -> Element:
        return self._source.preview(rows)

    def map(self, transform: Transform) -> Self:
        raise NotImplementedError("Examples must be transformed before they are divided among clients.")

    def indexed_batches(self, partition: RowPartition, seed: int | None) -> tf.data.Dataset:
        """See base class. A round has `partition.batch_size` positions."""
        if seed is None:
            return self._source.indexed_batches(partition, None)

        def plan_round(index: tf.Tensor) -> tf.data.Dataset:
            table, examples = tf.numpy_function(lambda n: self._plan(int(n), partition), [index], [tf.int64] * 2)
            table, examples = tf.ensure_shape(table, [None, 7]), tf.ensure_shape(examples, [None])
            rows = keras_internals.without_autograph(lambda row: (row, examples[row[0] : row[1]]))
            return tf.data.Dataset.from_tensor_slices(table).map(rows)

        def make_batch(row: tf.Tensor, examples: tf.Tensor) -> IndexedBatch:
            _, _, client, batch_index, ends_client, client_examples, ends_round = tf.unstack(row)
            rows = tf.size(examples)
            begins_client = tf.logical_and(rows > 0, tf.equal(batch_index, 0))
            batch = self._source._fetch(tf.pad(examples, [[0, tf.cast(tf.equal(rows, 0), tf.int32)]]))
            attributes = client, batch_index, begins_client, ends_client > 0, client_examples, ends_round > 0
            return IndexedBatch(ClientBatch(batch, rows, *attributes), examples)

        rounds = tf.data.Dataset.counter(partition.first // partition.batch_size)
        plans = rounds.flat_map(keras_internals.without_autograph(plan_round))
        return plans.map(keras_internals.without_autograph(make_batch), num_parallel_calls=tf.data.AUTOTUNE)

    def _plan(self, round_index: int, partition: RowPartition) -> tuple[np.ndarray, np.ndarray]:
        """Returns a table of the batches of this process's replicas in a round, and the concatenated indices of examples.

        Each row has the start and end of the batch's indices, and attributes of `ClientBatch`. Rows are in the order of
        local steps and, within a step, of replicas.
        """

        def client_batches(client: int) -> list[tuple[np.ndarray, list[int]]]:
            batches = self._clients.batches(round_index, client, self._batch_size)
            size = len(self._clients.examples[client])
            return [(batch, [client, i, i == len(batches) - 1, size]) for i, batch in enumerate(batches)]

        allocation = self._clients.allocate(round_index, partition.size)
        replica_batches = [[batch for client in clients for batch in client_batches(client)] for clients in allocation]
        local_steps = max(map(len, replica_batches))
        no_batch = (np.zeros([0], np.int64), [0] * 4)
        table, examples, position = [], [], 0
        for i, step_batches in enumerate(itertools.zip_longest(*replica_batches, fillvalue=no_batch), 1):
            for replica in partition.replicas:
                batch, attributes = step_batches[replica]
                table.append([position, position + len(batch), *attributes, i == local_steps])
                examples.append(batch)
                position += len(batch)
        return np.array(table, np.int64), np.concatenate(examples)


def _labels(source: Source, sync: FedAvg) -> np.ndarray:
    """Returns the class of each example, int64 [size]."""
    spec = source.element_spec[1]
    is_tensor = isinstance(spec, tf.TensorSpec)
    is_class = is_tensor and spec.dtype.is_integer and spec.shape in ([], [1])
    is_one_hot = is_tensor and spec.shape.rank == 1 and not is_class
    if not (is_class or is_one_hot):
        received = f"{spec.dtype.name}{spec.shape.as_list()}" if is_tensor else type(spec).__name__
        raise InputError(
            f"With shards_per_client, each example needs a class label. Received: sync={sync} and labels of {received}. Use "
            "shards_per_client=0."
        )

    @keras_internals.without_autograph
    def classes(element: IndexedBatch) -> tf.Tensor:
        y = element.batch[1]
        return tf.argmax(y, axis=1) if is_one_hot else tf.cast(tf.reshape(y, [-1]), tf.int64)

    partition = RowPartition(_LABEL_BATCH_SIZE, (0,), 1, total=source.size)
    with tf.device("CPU:0"):
        return np.concatenate(list(source.indexed_batches(partition, None).map(classes).as_numpy_iterator()))
