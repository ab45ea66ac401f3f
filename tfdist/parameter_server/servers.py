"""Connects a worker to the servers: places variables on them, and calls them."""

import collections
import contextlib
import functools
import hashlib
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives import Collectives, Op, SupportedDtypes
from tfdist.config.staleness import BY_SIZE, ROUND_ROBIN
from tfdist.coordination.calls import Connection, Message
from tfdist.distribution.balanced_parts import place_by_size
from tfdist.errors import InputError, PeerLostError
from tfdist.parameter_server.coordinator import Outcome, RangeResult
from tfdist.parameter_server.table_rows import TableSpec, count_rows, split
from tfdist.parameter_server.update_order import Update

_LEAVING_SECONDS = 5.0
_MEASURED = ("pull", "push")
BY_ROWS = -1  # placement of a table, instead of a server


def placement_of(
    sizes: Sequence[tuple[str, int]], tables: Collection[int], servers: int, method: str = BY_SIZE
) -> list[int]:
    """Returns the server of each variable, given its path and bytes, or `BY_ROWS` for tables, given their indices.

    The method is `BY_SIZE` (see `place_by_size`), `ROUND_ROBIN`, or `HASH`, by a hash of the path, so that a variable's
    server does not depend on other variables.
    """
    dense = [number for number in range(len(sizes)) if number not in tables]
    if method == BY_SIZE:
        dense_placement = place_by_size([sizes[number][1] for number in dense], servers)
    else:
        values = range(len(dense)) if method == ROUND_ROBIN else [_hash(sizes[number][0]) for number in dense]
        dense_placement = [value % servers for value in values]
    server_by_number = dict(zip(dense, dense_placement, strict=True))
    return [server_by_number.get(number, BY_ROWS) for number in range(len(sizes))]


def _hash(path: str) -> int:
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "little")


def bytes_by_server(sizes: Sequence[int], placement: Sequence[int], rows: Mapping[int, int], servers: int) -> list[int]:
    """Returns the bytes on each server, given the bytes of each variable, and the number of rows of each table by its index."""

    def load(server: int) -> int:
        shares = (sizes[table] // count * count_rows(count, server, servers) for table, count in rows.items())
        return sum(sizes[number] for number in _numbers_on(placement, server)) + sum(shares)

    return [load(server) for server in range(servers)]


def _numbers_on(placement: Sequence[int], server: int) -> list[int]:
    return [number for number, holder in enumerate(placement) if holder == server]


class Servers:
    """The servers of a job, called by one worker.

    Attributes:
      count: number of servers.
      worker: rank of the worker in the job.
      shard_variables: method of `placement_of`.
      models: number of models whose variables have been placed on the servers.
      workers: ranks of the workers in the last `gather`, the same on all workers; initially all.
      work: the work of this worker since its last commit; see `tfdist.synchronization.server_updates.Statistics`.
      update_seconds: for each server, time in which it has applied updates, as of the last `pull`.
    """

    def __init__(self, connections: Sequence[Connection], worker: int, workers: int, shard_variables: str = BY_SIZE):
        """Initializes the connections of worker `worker` of `workers`; the first server is also the coordinator."""
        self._connections, self.count, self.worker = connections, len(connections), worker
        self.shard_variables = shard_variables
        self._weights: list[int] = []  # server of each weight
        self._states: list[int] = []  # server of each state
        self._tables: list[int] = []  # indices of the weights that are split by rows
        self._keyed: frozenset[int] = frozenset()  # indices of the tables with a row per key
        self._gathers = itertools.count()
        self.models = 0
        self.workers = tuple(range(workers))
        self.work: dict[str, float] = collections.defaultdict(float)
        self.update_seconds = [0.0] * len(connections)

    def check_holds(self, model: int) -> None:
        """Raises `InputError` if the servers no longer hold the variables of a model, given its number, counted from 1."""
        if model != self.models:
            raise InputError(
                "Parameter servers hold one model at a time. Received: a model that is trained, read or assigned after another "
                "one was built. Train and save one model after the other."
            )

    def describe_wait(self) -> str:
        """Describes the call that is awaited, such as `server 0 (rank 2) to answer pull`; "" if there is none."""
        pending = (connection for connection in self._connections if connection.pending_method)
        return next((f"{connection.name} to answer {connection.pending_method}" for connection in pending), "")

    @property
    def placement(self) -> list[int]:
        """The server of each weight, or `BY_ROWS`, and then of each state."""
        return [*self._weights, *self._states]

    def coordinate(self, method: str, **values: Any) -> Any:
        """Calls the coordinator and returns its answer."""
        return self._connections[0].call(method, values).values["value"]

    def commit(
        self,
        ticket: int,
        arrays: Sequence[np.ndarray],
        pushes: Sequence[Message] = (),
        meanwhile: Callable[[], object] = lambda: None,
        **values: Any,
    ) -> tuple[Outcome, Any]:
        """Pushes a gradient, commits it with this worker's work once all servers have it, and takes the next ticket.

        Returns the answers of `Coordinator.commit` and `Coordinator.take`. Calls to a single server are sent together, in one
        round trip. The bytes of the push are then part of the next commit.

        Args:
          ticket: the ticket.
          arrays: see `Coordinator.commit`.
          pushes: the result of `push_messages`; empty for a gradient that is not finite.
          meanwhile: called before waiting for the answers.
          **values: see `Coordinator.commit`.
        """
        if self.count > 1 and pushes:
            self._call_all("push", pushes)
            pushes = ()
        for server, connection in enumerate(self._connections):
            for method in _MEASURED:
                self.work[f"{method}/{server}"] = connection.byte_counts.pop(method, 0)
        values |= {"worker": self.worker, "ticket": ticket, "work": self.work}
        self.work = collections.defaultdict(float)
        calls = [("commit", Message(values, arrays)), ("take", Message({"worker": self.worker}))]
        with self._measure("push"):
            receive = self._connections[0].begin([*(("push", message) for message in pushes), *calls])
        meanwhile()
        with self._measure("push"):
            answers = receive()
            *_, outcome = itertools.islice(answers, len(pushes) + 1)
        [answer] = answers
        return Outcome(outcome.values["value"]), answer.values["value"]

    def result(self) -> RangeResult:
        """Returns the result of the current range; see `Coordinator.result`."""
        answer = self._connections[0].call("result", {"worker": self.worker})
        losses, updates, *others = answer.values["value"]
        count = len(losses) if answer.arrays else 0
        result = RangeResult(losses, [Update(*update) for update in updates], *others)
        example_indices, metrics = answer.arrays[:count], answer.arrays[count:]
        return result._replace(example_indices=example_indices, metrics=metrics, work=answer.values["work"])

    def gather(self, arrays: Sequence[np.ndarray], receiver: int | None = None) -> list[list[np.ndarray]]:
        """Returns the arrays of each worker that is not lost; all workers must make the same calls in the same order.

        If there is a `receiver`, only this worker gets the arrays.
        """
        values = {"key": f"workers/{next(self._gathers)}", "member": self.worker, "receiver": receiver}
        answer = self._connections[0].call("gather", values, arrays)
        self.workers = tuple(answer.values["members"])
        all_arrays, count = answer.arrays, len(arrays)
        return [list(all_arrays[start : start + count]) for start in range(0, len(self.workers) * count, count)]

    def place(
        self,
        weights: Sequence[tuple[str, int]],
        states: Sequence[tuple[str, int]],
        tables: Sequence[int] = (),
        keyed: Collection[int] = (),
    ) -> None:
        """Assigns weights and states to servers, given their paths and bytes; `tables` are the indices of split weights."""
        self._tables, self._keyed = list(tables), frozenset(keyed)
        placement = placement_of([*weights, *states], tables, self.count, self.shard_variables)
        self._weights, self._states = placement[: len(weights)], placement[len(weights) :]

    def define(
        self,
        weights: Mapping[int, np.ndarray],
        states: Sequence[np.ndarray],
        forms: Mapping[int, Sequence[Any]],
        tables: Mapping[int, TableSpec],
        **options: Any,
    ) -> str:
        """Creates the variables; returns the reason why the servers reject the optimizer, or "".

        Args:
          weights: values of the weights other than tables, by index.
          states: values of the states.
          forms: for each weight, path, constraint and whether it is excluded from decay; see `VariableServer.define`.
          tables: descriptions of the tables.
          **options: see `VariableServer.define`.
        """
        messages = []
        for server in range(self.count):
            weight_numbers, state_numbers = _numbers_on(self._weights, server), _numbers_on(self._states, server)
            weight_forms = [(number, *forms[number]) for number in (*weight_numbers, *tables)]
            values = {"weights": weight_forms, "tables": list(tables.values()), "states": state_numbers}
            values |= {"server": server, "servers": self.count, **options}
            arrays = [*(weights[number] for number in weight_numbers), *(states[number] for number in state_numbers)]
            messages.append(Message(values, arrays))
        return next((answer.values["refused"] for answer in self._call_all("define", messages) if answer.values), "")

    def pull(
        self, version: int | Sequence[int], ids: Sequence[np.ndarray] = ()
    ) -> tuple[list[int], list[np.ndarray], list[np.ndarray], float]:
        """Returns each server's version, weights, states, and the latest global gradient norm that was requested.

        Args:
          version: minimum version; waits until all servers have it. In a replay, the exact version of each server.
          ids: rows of each table to return as its value; by default, no tables are read.
        """
        parts = [self.split(*table_ids) for table_ids in zip(self._tables, ids, strict=False)]
        versions, is_exact = ([version] * self.count, False) if isinstance(version, int) else (version, True)
        answers = self._call_all(
            "pull",
            [
                Message({"version": each, "is_exact": is_exact}, [table_parts[server][1] for table_parts in parts])
                for server, each in enumerate(versions)
            ],
        )
        arrays = [iter(answer.arrays) for answer in answers]
        weights: list[Any] = [None if server == BY_ROWS else next(arrays[server]) for server in self._weights]
        states = [next(arrays[server]) for server in self._states]
        for number, table_parts in zip(self._tables, parts, strict=False):
            weights[number] = _merge(table_parts, [next(server_arrays) for server_arrays in arrays])
        self.update_seconds = [answer.values["update_seconds"] for answer in answers]
        return [answer.values["version"] for answer in answers], weights, states, answers[0].values["norm"]

    def push_messages(
        self,
        ticket: int,
        versions: Sequence[int],
        gradients: Sequence[np.ndarray],
        states: Sequence[tuple[np.ndarray, np.ndarray]],
        *,
        methods: Sequence[str],
        ids: Sequence[np.ndarray] = (),
        norm: float | None = None,
        with_gradient_norm: bool = False,
    ) -> list[Message]:
        """Returns, for each server, a message with its gradients and states.

        Args:
          ticket: the ticket.
          versions: for each server, version of the weights from which the gradients were computed.
          gradients: payload of each gradient; see `PushReducer`. For a table, the gradients of its rows `ids`.
          states: each state before and after the forward pass; empty if workers have their own states.
          methods: compression method of each gradient.
          ids: distinct ids of the rows of each table.
          norm: norm of the gradients; None if they are only a share of a batch's gradients.
          with_gradient_norm: whether the servers compute the norm of the sum of the shares.
        """
        parts = [self.split(*table_ids) for table_ids in zip(self._tables, ids, strict=True)]

        def message_for(server: int) -> Message:
            numbers = _numbers_on(self._weights, server)
            arrays = [gradients[number] for number in numbers]
            for number, table_parts in zip(self._tables, parts, strict=True):
                positions, server_ids = table_parts[server]
                arrays += [server_ids, gradients[number][positions]]
            for number in _numbers_on(self._states, server) if states else ():
                arrays += states[number]
            values: dict[str, Any] = {"worker": self.worker, "ticket": ticket, "version": versions[server]}
            values |= {
                "norm": norm,
                "with_gradient_norm": with_gradient_norm,
                "methods": [methods[number] for number in numbers],
            }
            return Message(values, arrays)

        return [message_for(server) for server in range(self.count)]

    def discard(self, ticket: int) -> None:
        """Removes this worker's share of a ticket, which no update uses."""
        self._call_all("discard", [Message({"worker": self.worker, "ticket": ticket})] * self.count)

    def leave_out(self, numbers: Sequence[int]) -> None:
        """Excludes weights on which the loss does not depend from updates."""
        self._call_all("leave_out", [Message({"numbers": list(numbers)})] * self.count)

    def write(self, values: Mapping[str, np.ndarray], **options: Any) -> None:
        """Assigns values by key, on the servers that hold them; see `VariableServer.write`."""
        keys_by_server = [self._keys_on(values, server) for server in range(self.count)]
        self._call_all(
            "write", [Message({"keys": keys, **options}, [values[key] for key in keys]) for keys in keys_by_server]
        )

    def fetch(self, keys: Iterable[str]) -> dict[str, np.ndarray]:
        """Returns values by key, each from the first server that holds it."""
        values: dict[str, np.ndarray] = {}
        for server, connection in enumerate(self._connections):
            if server_keys := [key for key in self._keys_on(keys, server) if key not in values]:
                values |= zip(server_keys, connection.call("fetch", {"keys": server_keys}).arrays, strict=True)
        return values

    def read_rows(self, key: str, ids: np.ndarray) -> np.ndarray:
        """Returns rows of a table or of its slots."""
        number, index = _table_of(key)
        parts = self.split(number, ids)
        answers = self.call_table(number, "read_rows", [[server_ids] for _, server_ids in parts], index=index)
        return _merge(parts, [rows for [rows] in answers])

    def write_rows(self, key: str, ids: np.ndarray, rows: np.ndarray) -> None:
        """Assigns rows of a table or of its slots."""
        number, index = _table_of(key)
        arrays = [[server_ids, np.asarray(rows[positions])] for positions, server_ids in self.split(number, ids)]
        self.call_table(number, "write_rows", arrays, index=index)

    def call_table(
        self, number: int, method: str, arrays: Sequence[Sequence[np.ndarray]] | None = None, **options: int
    ) -> list[Sequence[np.ndarray]]:
        """Calls a method of a table on all servers, with arrays for each, if any; returns their results."""
        values = {"table": number, "method": method, "options": options}
        messages = [Message(values, server_arrays) for server_arrays in arrays or [()] * self.count]
        return [answer.arrays for answer in self._call_all("call_table", messages)]

    def split(self, number: int, ids: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the positions and ids of rows of a table on each server; see `table_rows.split`."""
        return split(ids, self.count, number in self._keyed)

    def leave(self) -> None:
        """Tells the servers that this worker has finished, and closes the connections."""
        for connection in self._connections:
            with contextlib.suppress(PeerLostError):  # the server may be lost
                connection.call("leave", {"worker": self.worker}, seconds=_LEAVING_SECONDS)
            connection.close()

    def _keys_on(self, keys: Iterable[str], server: int) -> list[str]:
        servers_by_kind = {"weight": self._weights, "slot": self._weights, "state": self._states}

        def holds(key: str) -> bool:
            kind, number, *_ = key.split("/")
            return kind not in servers_by_kind or servers_by_kind[kind][int(number)] == server

        return [key for key in keys if holds(key)]

    def _call_all(self, method: str, messages: Sequence[Message]) -> list[Message]:
        """Calls all servers at once, each with its message, and returns their answers."""
        with self._measure(method) if method in _MEASURED else contextlib.nullcontext():
            answers = [
                connection.begin([(method, message)])
                for connection, message in zip(self._connections, messages, strict=True)
            ]
            return [message for answer in answers for message in answer()]

    @contextlib.contextmanager
    def _measure(self, method: str) -> Iterator[None]:
        start_time = time.perf_counter()
        yield
        self.work[method] += time.perf_counter() - start_time


def _table_of(key: str) -> tuple[int, int]:
    """Returns the index of a table, and 0 for its rows or the number of its slot, counted from 1."""
    _, number, *slot = key.split("/")
    return int(number), int(slot[0]) + 1 if slot else 0


def _merge(parts: Sequence[tuple[np.ndarray, np.ndarray]], rows: Sequence[np.ndarray]) -> np.ndarray:
    """Merges the rows of all servers, given the result of `split`."""
    merged = np.empty([sum(map(len, rows)), *rows[0].shape[1:]], rows[0].dtype)
    for (positions, _), server_rows in zip(parts, rows, strict=True):
        merged[positions] = server_rows
    return merged


_DTYPES = frozenset([tf.float16, tf.float32, tf.float64, tf.int32, tf.int64])


class WorkerCollectives(Collectives):
    """Collectives that gather the tensors of all workers through the coordinator, and reduce them in the order of ranks.

    Lost workers are excluded; a rank is an index among the remaining workers.

    Cost: each worker sends n bytes and receives n N bytes, in one round trip.
    """

    dtypes = SupportedDtypes(reducible=_DTYPES, gatherable=_DTYPES, packed=tf.int32)

    def __init__(self, servers: Servers):
        self._servers = servers

    @property
    def size(self) -> int:  # type: ignore[override]
        """Number of workers in the last call."""
        return len(self._servers.workers)

    @property
    def rank(self) -> int:
        return self._servers.workers.index(self._servers.worker)

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        return self._combine(lambda values: _reduce(values, op), tensors, [tensor.shape for tensor in tensors])

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        return self._combine(np.concatenate, tensors, [tf.TensorShape([None, *tensor.shape[1:]]) for tensor in tensors])

    def _combine(
        self, combine: Callable[[Any], np.ndarray], tensors: Sequence[tf.Tensor], shapes: Sequence[tf.TensorShape]
    ) -> list[tf.Tensor]:
        def gather(*arrays: np.ndarray) -> list[np.ndarray]:
            return [combine(values) for values in zip(*self._servers.gather(arrays), strict=True)]

        if not tensors:
            return []
        results = tf.numpy_function(gather, list(tensors), [tensor.dtype for tensor in tensors])
        return [tf.ensure_shape(result, shape) for result, shape in zip(results, shapes, strict=True)]


def _reduce(values: Sequence[np.ndarray], op: Op) -> np.ndarray:
    total = functools.reduce(np.maximum if op == "max" else np.add, values)
    return np.asarray(total / len(values) if op == "mean" else total, values[0].dtype)
