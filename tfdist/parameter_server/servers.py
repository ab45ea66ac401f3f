"""A worker's connection to the servers: the placement of variables, and calls to all servers."""

import collections
import contextlib
import hashlib
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives import Collectives, Op, Wire
from tfdist.config.staleness import BY_SIZE, ROUND_ROBIN
from tfdist.distribution.balanced_parts import place_by_size
from tfdist.errors import PeerLostError
from tfdist.gradients.compression import EXACT
from tfdist.parameter_server.coordinator import Outcome, RangeResult
from tfdist.parameter_server.messages import Call, Connection, Message
from tfdist.parameter_server.table_rows import TableForm, count_rows, split
from tfdist.parameter_server.update_order import Update

_LEAVING_SECONDS = 5.0
_MEASURED = ("pull", "push")
BY_ROWS = -1  # placement of a table, instead of a server


def placement_of(
    sizes: Sequence[tuple[str, int]], tables: Collection[int], servers: int, method: str = BY_SIZE
) -> list[int]:
    """Returns the server of each variable, or `BY_ROWS` for tables.

    Args:
      sizes: path and bytes of each variable.
      tables: indices of the variables that are split by rows over all servers.
      servers: number of servers.
      method: `BY_SIZE`, see `place_by_size`; `ROUND_ROBIN`, in turn; or `HASH`, by a hash of the path, so that a variable's
        server does not depend on other variables.
    """
    dense = [number for number in range(len(sizes)) if number not in tables]
    if method == BY_SIZE:
        dense_placement = place_by_size([sizes[number][1] for number in dense], servers)
    elif method == ROUND_ROBIN:
        dense_placement = [position % servers for position in range(len(dense))]
    else:
        dense_placement = [_hash(sizes[number][0]) % servers for number in dense]
    placement = [BY_ROWS] * len(sizes)
    for number, server in zip(dense, dense_placement, strict=True):
        placement[number] = server
    return placement


def _hash(path: str) -> int:
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "little")


class Servers:
    """The servers of a job, called by one worker.

    Attributes:
      shard_variables: method of `placement_of`.
      models: number of models whose variables have been placed on the servers.
      workers: ranks of the workers in the last `gather`, the same on all workers; initially all.
      work: the work of this worker since its last commit; see `Statistics`.
      update_seconds: for each server, time in which it has applied updates, as of the last `pull`.
    """

    def __init__(self, connections: Sequence[Connection], worker: int, workers: int, shard_variables: str = BY_SIZE):
        """Initializes the calls.

        Args:
          connections: connections to all servers; the coordinator runs on the first.
          worker: rank of this worker.
          workers: number of workers.
          shard_variables: method of `placement_of`.
        """
        self._connections, self._worker = connections, worker
        self.shard_variables = shard_variables
        self._weights: list[int] = []  # server of each weight
        self._states: list[int] = []  # server of each state
        self._tables: list[int] = []  # indices of the weights that are split by rows
        self._keyed: frozenset[int] = frozenset()  # of those with a row per key
        self._gathers = itertools.count()
        self.models = 0
        self.workers = tuple(range(workers))
        self.work: dict[str, float] = collections.defaultdict(float)
        self.update_seconds = [0.0] * len(connections)

    @property
    def count(self) -> int:
        """Number of servers."""
        return len(self._connections)

    def describe_wait(self) -> str:
        """Describes the server whose answer is awaited, such as `server 0 (rank 2) to answer pull`; "" for none."""
        pending = (connection for connection in self._connections if connection.pending_method)
        return next((f"{connection.name} to answer {connection.pending_method}" for connection in pending), "")

    @property
    def placement(self) -> list[int]:
        """The server of each weight, or `BY_ROWS`, and then of each state."""
        return [*self._weights, *self._states]

    def coordinate(self, method: str, **values: Any) -> Any:
        """Calls the coordinator and returns its answer."""
        return self._connections[0].call(method, values).values["value"]

    def commit_calls(self, ticket: int, arrays: Sequence[np.ndarray], **values: Any) -> list[Call]:
        """Returns calls that commit a gradient that all servers have, with the work, and take the next ticket.

        See `Coordinator`. The bytes of a push that is sent together with these calls are part of the next commit.
        """
        for server, connection in enumerate(self._connections):
            for method in _MEASURED:
                self.work[f"{method}/{server}"] = connection.byte_counts.pop(method, 0)
        values |= {"worker": self._worker, "ticket": ticket, "work": self.work}
        self.work = collections.defaultdict(float)
        return [("commit", Message(values, arrays)), ("take", Message({"worker": self._worker}))]

    def commit_and_take(
        self, calls: Sequence[Call], push: Message | None = None, meanwhile: Callable[[], object] = lambda: None
    ) -> tuple[Outcome, Any]:
        """Makes the calls of `commit_calls` in one round trip, after a push to the same server, if any.

        Calls `meanwhile` before it waits for the answers.

        Returns:
          The answers of `Coordinator.commit` and `Coordinator.take`.
        """
        with self._measure("push"):
            receive = self._connections[0].begin([*([("push", push)] if push else []), *calls])
        meanwhile()
        with self._measure("push"):
            answers = receive()
            if push:
                next(answers)
            outcome = Outcome(next(answers).values["value"])
        [answer] = answers
        return outcome, answer.values["value"]

    def result(self) -> RangeResult:
        """Returns the result of a range; see `Coordinator.result`."""
        answer = self._connections[0].call("result", {"worker": self._worker})
        losses, updates, is_finite, norm, dropped_rows, rejections = answer.values["value"]
        count = len(losses) if answer.arrays else 0
        parsed_updates = [Update(*update) for update in updates]
        counts = RangeResult(losses, parsed_updates, is_finite, norm, dropped_rows, rejections)
        return counts._replace(numbers=answer.arrays[:count], metrics=answer.arrays[count:], work=answer.values["work"])

    def gather(self, arrays: Sequence[np.ndarray], receiver: int | None = None) -> list[list[np.ndarray]]:
        """Returns the arrays of each worker that is not lost; all must make the same calls in the same order.

        If there is a `receiver`, only this worker gets the arrays.
        """
        values = {"key": f"workers/{next(self._gathers)}", "member": self._worker, "receiver": receiver}
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
        """Assigns variables to servers.

        Args:
          weights: paths and bytes of the trained variables.
          states: paths and bytes of the variables that layers assign.
          tables: indices of the trained variables that are split by rows over all servers.
          keyed: those of them with a row per key.
        """
        self._tables, self._keyed = list(tables), frozenset(keyed)
        placement = placement_of([*weights, *states], tables, self.count, self.shard_variables)
        self._weights, self._states = placement[: len(weights)], placement[len(weights) :]

    def define(
        self,
        weights: Mapping[int, np.ndarray],
        states: Sequence[np.ndarray],
        forms: Mapping[int, Any],
        tables: Sequence[TableForm] = (),
        **options: Any,
    ) -> str:
        """Creates the variables.

        Args:
          weights: values of the weights other than tables, by number.
          states: values of the states.
          forms: descriptions of these weights; see `VariableServer.define`.
          tables: descriptions of the tables.
          **options: see `VariableServer.define`.

        Returns:
          The reason why the servers reject the optimizer; "" if they accept it.
        """

        def message_for(server: int) -> Message:
            weight_numbers, state_numbers = (
                self._numbers_on(self._weights, server),
                self._numbers_on(self._states, server),
            )
            values = {
                "weights": [(number, *forms[number]) for number in weight_numbers],
                "states": state_numbers,
                **options,
            }
            values |= {"tables": tables, "server": server, "servers": self.count}
            return Message(
                values, [*(weights[number] for number in weight_numbers), *(states[number] for number in state_numbers)]
            )

        return next((answer.values["refused"] for answer in self._call_all("define", message_for) if answer.values), "")

    def pull(
        self, version: int | Sequence[int], ids: Sequence[np.ndarray] = ()
    ) -> tuple[list[int], list[np.ndarray], list[np.ndarray], float]:
        """Returns each server's version, weights, states, and the latest global gradient norm that was requested.

        Args:
          version: minimum version; waits until all servers have it. Or the exact version of each server, in a replay.
          ids: rows of each table to return as its value; by default, no tables are read.
        """
        parts = [self._split(*table_ids) for table_ids in zip(self._tables, ids, strict=False)]
        minimum_versions = [version] * self.count if isinstance(version, int) else version

        def message_for(server: int) -> Message:
            is_exact = not isinstance(version, int)
            return Message(
                {"version": minimum_versions[server], "is_exact": is_exact},
                [table_parts[server][1] for table_parts in parts],
            )

        answers = self._call_all("pull", message_for)
        weights: list[Any] = [None] * len(self._weights)
        states: list[Any] = [None] * len(self._states)
        for server, answer in enumerate(answers):
            arrays = iter(answer.arrays)
            for values, placement in ((weights, self._weights), (states, self._states)):
                for number in self._numbers_on(placement, server):
                    values[number] = next(arrays)
            for number, table_ids, table_parts in zip(self._tables, ids, parts, strict=False):
                rows = next(arrays)
                if weights[number] is None:
                    weights[number] = np.empty([len(table_ids), rows.shape[1]], rows.dtype)
                weights[number][table_parts[server][0]] = rows
        self.update_seconds = [answer.values["update_seconds"] for answer in answers]
        return [answer.values["version"] for answer in answers], weights, states, answers[0].values["norm"]

    def push(
        self,
        ticket: int,
        versions: Sequence[int],
        gradients: Sequence[np.ndarray],
        previous_states: Sequence[np.ndarray],
        new_states: Sequence[np.ndarray],
        *,
        methods: Sequence[str] = (),
        ids: Sequence[np.ndarray] = (),
        norm: float | None = None,
        with_norm: bool = False,
        calls: Sequence[Call] = (),
        meanwhile: Callable[[], object] = lambda: None,
    ) -> tuple[Outcome, Any] | None:
        """Sends gradients, and the states before and after the forward pass, to their servers.

        Args:
          ticket: the ticket.
          versions: for each server, version of the weights from which the gradients were computed.
          gradients: payload of each gradient; see `PushReducer`. That of a table is the gradients of its rows `ids`.
          previous_states: states before the forward pass.
          new_states: states after it.
          methods: compression method of each gradient; by default none is compressed.
          ids: distinct ids of the rows of each table.
          norm: norm of the gradients; None if they are a share.
          with_norm: whether the servers compute the norm of the sum of the shares.
          calls: calls for `commit_and_take` once all servers have the gradients; those to a single server are sent together.
          meanwhile: see `commit_and_take`.

        Returns:
          The result of `commit_and_take`; None without calls.
        """
        parts = [self._split(*table_ids) for table_ids in zip(self._tables, ids, strict=True)]

        def message_for(server: int) -> Message:
            numbers = self._numbers_on(self._weights, server)
            arrays = [gradients[number] for number in numbers]
            for number, table_parts in zip(self._tables, parts, strict=True):
                positions, server_ids = table_parts[server]
                arrays += [server_ids, gradients[number][positions]]
            state_numbers = self._numbers_on(self._states, server) if new_states else ()
            states = [state for number in state_numbers for state in (previous_states[number], new_states[number])]
            values: dict[str, Any] = {"worker": self._worker, "ticket": ticket, "version": versions[server]}
            values |= {"methods": [methods[number] if methods else EXACT for number in numbers]}
            values |= {"norm": norm, "with_norm": with_norm}
            return Message(values, [*arrays, *states])

        if calls and self.count == 1:
            return self.commit_and_take(calls, message_for(0), meanwhile)
        self._call_all("push", message_for)
        return self.commit_and_take(calls, meanwhile=meanwhile) if calls else None

    def discard(self, ticket: int) -> None:
        """Removes this worker's share of a ticket, which no update uses."""
        self._call_all("discard", lambda _: Message({"worker": self._worker, "ticket": ticket}))

    def leave_out(self, numbers: Sequence[int]) -> None:
        """Excludes weights on which the loss does not depend from updates."""
        self._call_all("leave_out", lambda _: Message({"numbers": list(numbers)}))

    def write(self, values: Mapping[str, np.ndarray], **options: Any) -> None:
        """Assigns values by key, on the servers that hold them; see `VariableServer.write`."""
        self._call_all("write", lambda server: _values_message(self._keys_on(values, server), values, **options))

    def fetch(self, keys: Iterable[str]) -> dict[str, np.ndarray]:
        """Returns values by key, each from the first server that holds it."""
        values: dict[str, np.ndarray] = {}
        for server, connection in enumerate(self._connections):
            server_keys = [key for key in self._keys_on(keys, server) if key not in values]
            values |= (
                zip(server_keys, connection.call("fetch", {"keys": server_keys}).arrays, strict=True)
                if server_keys
                else ()
            )
        return values

    def read_rows(self, key: str, ids: np.ndarray) -> np.ndarray:
        """Returns rows of a table or of its slots."""
        parts = self._split(_number_of(key), ids)
        answers = self._call_all("read_rows", lambda server: Message({"key": key}, [parts[server][1]]))
        first_rows = answers[0].arrays[0]
        rows = np.empty([len(ids), *first_rows.shape[1:]], first_rows.dtype)
        for (positions, _), answer in zip(parts, answers, strict=True):
            rows[positions] = answer.arrays[0]
        return rows

    def row_use(self) -> list[list[int]]:
        """Returns the use of the rows of each table; see `TableRows.use`."""
        answers = [answer.values["value"] for answer in self._call_all("row_use", lambda _: Message({}))]
        return [[*map(sum, zip(*parts, strict=True))] for parts in zip(*answers, strict=True)]

    def write_rows(self, key: str, ids: np.ndarray, rows: np.ndarray) -> None:
        """Assigns rows of a table or of its slots."""
        parts = self._split(_number_of(key), ids)
        self._call_all("write_rows", lambda s: Message({"key": key}, [parts[s][1], np.asarray(rows[parts[s][0]])]))

    def read_keys(self, number: int) -> tuple[np.ndarray, np.ndarray, int, int]:
        """Returns the keys of a table; see `KeyedTable.read_keys`."""
        answers = self._call_all("read_keys", lambda _: Message({"number": number}))
        keys, candidates = (np.concatenate(parts) for parts in zip(*(answer.arrays for answer in answers), strict=True))
        return keys, candidates, answers[0].values["updates"], answers[0].values["count"]

    def write_keys(self, number: int, keys: np.ndarray, candidates: np.ndarray, updates: int, count: int) -> int:
        """Replaces the keys of a table; see `KeyedTable.write_keys`."""
        parts = [
            [array[positions] for positions, _ in self._split(number, array[:, 0])] for array in (keys, candidates)
        ]
        values = {"number": number, "updates": updates, "count": count}
        answers = self._call_all("write_keys", lambda server: Message(values, [array[server] for array in parts]))
        return answers[0].values["count"]

    def _split(self, number: int, ids: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        return split(ids, self.count, number in self._keyed)

    def loads(self, weights: Sequence[int], rows: Mapping[int, int]) -> list[int]:
        """Returns the bytes of the trained variables on each server.

        Args:
          weights: bytes of the trained variables.
          rows: number of rows of each table, by its index.
        """

        def load(server: int) -> int:
            shares = [weights[table] // count * count_rows(count, server, self.count) for table, count in rows.items()]
            return sum(weights[number] for number in self._numbers_on(self._weights, server)) + sum(shares)

        return [load(server) for server in range(self.count)]

    def leave(self) -> None:
        """Tells the coordinator that this worker has finished, and closes the connections."""
        with contextlib.suppress(PeerLostError):  # the server may be lost
            self._connections[0].call("leave", {"member": self._worker}, seconds=_LEAVING_SECONDS)
        for connection in self._connections:
            connection.close()

    def _keys_on(self, keys: Iterable[str], server: int) -> list[str]:
        servers_by_kind = {"weight": self._weights, "slot": self._weights, "state": self._states}

        def holds(key: str) -> bool:
            kind, number, *_ = key.split("/")
            return kind not in servers_by_kind or servers_by_kind[kind][int(number)] == server

        return [key for key in keys if holds(key)]

    def _call_all(self, method: str, message: Callable[[int], Message]) -> list[Message]:
        """Calls all servers at once, and returns their answers."""
        with self._measure(method) if method in _MEASURED else contextlib.nullcontext():
            answers = [
                connection.begin([(method, message(number))]) for number, connection in enumerate(self._connections)
            ]
            return [message for answer in answers for message in answer()]

    @contextlib.contextmanager
    def _measure(self, method: str) -> Iterator[None]:
        start_time = time.perf_counter()
        yield
        self.work[method] += time.perf_counter() - start_time

    @staticmethod
    def _numbers_on(placement: Sequence[int], server: int) -> list[int]:
        return [number for number, holder in enumerate(placement) if holder == server]


def _number_of(key: str) -> int:
    return int(key.split("/")[1])


def _values_message(keys: Sequence[str], values: Mapping[str, np.ndarray], **options: Any) -> Message:
    return Message({"keys": keys, **options}, [values[key] for key in keys])


_DTYPES = frozenset([tf.float16, tf.float32, tf.float64, tf.int32, tf.int64])


class WorkerCollectives(Collectives):
    """Collectives that gather the tensors of all workers through the coordinator, and reduce them in the order of ranks.

    Lost workers are excluded, and ranks count the remaining workers.

    Cost: each worker sends n bytes and receives n N bytes, in one round trip.
    """

    wire = Wire(reduces=_DTYPES, gathers=_DTYPES, packed=tf.int32)

    def __init__(self, servers: Servers, worker: int):
        """Initializes the collectives; `worker` is the rank in the job."""
        self._servers, self._worker = servers, worker

    @property
    def size(self) -> int:  # type: ignore[override]
        """Number of workers in the last call."""
        return len(self._servers.workers)

    @property
    def rank(self) -> int:
        """See base class."""
        return self._servers.workers.index(self._worker)

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class."""

        def reduce(*arrays: np.ndarray) -> list[np.ndarray]:
            return [_reduce(values, op) for values in zip(*self._servers.gather(arrays), strict=True)]

        return self._call(reduce, tensors, [tensor.shape for tensor in tensors])

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """See base class."""

        def concatenate(*arrays: np.ndarray) -> list[np.ndarray]:
            return [np.concatenate(values) for values in zip(*self._servers.gather(arrays), strict=True)]

        return self._call(concatenate, tensors, [tf.TensorShape([None, *tensor.shape[1:]]) for tensor in tensors])

    @staticmethod
    def _call(function: object, tensors: Sequence[tf.Tensor], shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
        if not tensors:
            return []
        results = tf.numpy_function(function, list(tensors), [tensor.dtype for tensor in tensors])
        return [tf.ensure_shape(result, shape) for result, shape in zip(results, shapes, strict=True)]


def _reduce(values: Sequence[np.ndarray], op: Op) -> np.ndarray:
    total = values[0]
    for value in values[1:]:
        total = np.maximum(total, value) if op == "max" else total + value
    return np.asarray(total / len(values) if op == "mean" else total, values[0].dtype)
