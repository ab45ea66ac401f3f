"""Virtual clients: who has which examples of a data set, and which clients train in a round, and on which batches.

All draws use the raw integers of NumPy's bit generators, which are the same in every version and on every machine.
"""

import itertools
from typing import NamedTuple

import numpy as np

from tfdist.errors import InputError
from tfdist.grammar.sync import FedAvg

_SPLIT, _SHARDS, _CLIENTS, _BATCHES = range(1, 5)  # purposes of random numbers


class ClientBatch(NamedTuple):
    """A batch of one client.

    Attributes:
      examples: [rows], indices of the examples.
      client: number of the client.
      number: number of the batch among those of the client in this round, from 0.
      is_last: whether it is the last of these.
      client_examples: number of examples of the client.
    """

    examples: np.ndarray
    client: int
    number: int
    is_last: bool
    client_examples: int


class Clients:
    """The clients of a data set, as a pure function of the seed.

    Attributes:
      examples: of each client, the indices of its examples, ascending.
    """

    def __init__(self, sync: FedAvg, size: int, seed: int, shuffle: bool = True, labels: np.ndarray | None = None):
        """Divides the examples.

        Args:
          sync: number of clients, and how they are drawn.
          size: number of examples.
          seed: seed of the run.
          shuffle: whether a client's examples are shuffled in each of its epochs.
          labels: [size], class of each example; needed for `sync.shards_per_client`.

        Raises:
          InputError: there are too few examples.
        """
        shards = max(1, sync.shards_per_client)
        if sync.clients * shards > size:
            each = f" in each of its {shards} shards" if shards > 1 else ""
            raise InputError(
                f"Every client needs an example{each}. Received: sync={sync} and {size} examples. Use fewer clients."
            )
        self._sync, self._seed, self._shuffle = sync, seed % 2**64, shuffle
        self.examples = self._divided(size, shards, labels)

    def drawn(self, number: int) -> list[int]:
        """Returns the clients that train in a round."""
        order = _permutation(self._sync.clients, self._seed, _CLIENTS, number)
        return [int(client) for client in order[: self._sync.drawn]]

    def allocated(self, number: int, replicas: int) -> list[list[int]]:
        """Returns the clients that each replica trains in a round, such that replicas have about as many examples.

        The largest client goes first, each to the replica with the fewest examples so far.
        """
        found: list[list[int]] = [[] for _ in range(replicas)]
        loads = [0] * replicas
        for client in sorted(self.drawn(number), key=lambda client: (-len(self.examples[client]), client)):
            replica = loads.index(min(loads))
            found[replica].append(client)
            loads[replica] += len(self.examples[client])
        return found

    def batches(self, number: int, client: int, batch_size: int) -> list[ClientBatch]:
        """Returns the batches on which a client trains in a round: a function of the seed, the round and the client."""
        own, found = self.examples[client], []
        for epoch in range(self._sync.local_epochs):
            key = (self._seed, _BATCHES, number, client, epoch)
            order = own[_permutation(len(own), *key)] if self._shuffle else own
            found += [order[start : start + batch_size] for start in range(0, len(own), batch_size)]
        last = len(found) - 1
        return [ClientBatch(rows, client, i, i == last, len(own)) for i, rows in enumerate(found)]

    def _divided(self, size: int, shards: int, labels: np.ndarray | None) -> list[np.ndarray]:
        order = _permutation(size, self._seed, _SPLIT)
        if labels is not None:
            order = order[np.argsort(labels[order], kind="stable")]
        sizes = [_split(count, shards) for count in _sizes(self._sync, size, shards)]
        # All shards in random order are cut from the sorted examples, one after the other.
        flat = list(itertools.chain.from_iterable(sizes))
        places = _permutation(len(flat), self._seed, _SHARDS)
        cuts = np.cumsum([flat[shard] for shard in places])[:-1]
        pieces: list[list[np.ndarray]] = [[] for _ in sizes]
        for shard, piece in zip(places, np.split(order, cuts), strict=True):
            pieces[shard // shards].append(piece)
        return [np.sort(np.concatenate(parts)) for parts in pieces]


def _sizes(sync: FedAvg, size: int, least: int) -> list[int]:
    """Returns the number of examples of each client, at least `least`."""
    if sync.client_sizes == "equal":
        return _split(size, sync.clients)
    weights = np.cumsum(1 / np.arange(1, sync.clients + 1))
    spare = size - least * sync.clients
    ends = np.floor(weights / weights[-1] * spare).astype(np.int64)
    return [least + int(count) for count in np.diff(ends, prepend=0)]


def _split(total: int, parts: int) -> list[int]:
    """Returns `parts` integers that add up to `total` and differ by at most 1."""
    quotient, extra = divmod(total, parts)
    return [quotient + (part < extra) for part in range(parts)]


def _permutation(count: int, *key: int) -> np.ndarray:
    """Returns a random permutation of range(count), int64, given non-negative integers."""
    raw = np.random.PCG64(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(raw, kind="stable").astype(np.int64)
