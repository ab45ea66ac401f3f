"""What a worker knows of the servers: which variables each of them holds, and the calls to all of them."""

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives import Collectives, Op, Wire
from tfdist.errors import PeerLostError
from tfdist.parameter_server.coordinator import RangeResult
from tfdist.parameter_server.messages import Connection, Message
from tfdist.parameter_server.table_rows import TableForm, count_rows, split
from tfdist.parameter_server.update_order import Update

_LEAVING_SECONDS = 5.0
BY_ROWS = -1  # instead of the server of a variable, for a table


def by_size(sizes: Sequence[int], servers: int) -> list[int]:
    """Returns the server of each variable: the largest first, each on the server that has the fewest bytes.

    Args:
      sizes: bytes of each variable.
      servers: number of servers.
    """
    loads, placed = [0] * servers, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        placed[number] = loads.index(min(loads))
        loads[placed[number]] += sizes[number]
    return placed


def placement_of(sizes: Sequence[int], tables: Collection[int], servers: int) -> list[int]:
    """Returns the server of each variable, `BY_ROWS` for tables; see `by_size`.

    Args:
      sizes: bytes of each variable.
      tables: numbers of those that are split by rows over all servers.
      servers: number of servers.
    """
    dense = [number for number in range(len(sizes)) if number not in tables]
    placed = [BY_ROWS] * len(sizes)
    for number, server in zip(dense, by_size([sizes[number] for number in dense], servers), strict=True):
        placed[number] = server
    return placed


class Servers:
    """The servers of a job, called by one worker.

    Attributes:
      models: number of models of which servers have held the variables.
      workers: ranks of the workers that have taken part in the last `gather`, the same on all of them; at first all.
    """

    def __init__(self, connections: Sequence[Connection], worker: int, workers: int):
        """Initializes the calls.

        Args:
          connections: to each server; the coordinator runs on the first.
          worker: rank of this worker.
          workers: number of workers.
        """
        self._connections, self._worker = connections, worker
        self._weights: list[int] = []  # server of each weight
        self._states: list[int] = []  # server of each state
        self._tables: list[int] = []  # numbers of the weights that are split by rows
        self._gathers = itertools.count()
        self.models = 0
        self.workers = tuple(range(workers))

    @property
    def count(self) -> int:
        """Number of servers."""
        return len(self._connections)

    @property
    def placement(self) -> list[int]:
        """The server of each weight, or `BY_ROWS`, and then of each state."""
        return [*self._weights, *self._states]

    def coordinate(self, method: str, **values: Any) -> Any:
        """Calls the coordinator, and returns its answer."""
        return self._connections[0].call(method, values).values["value"]

    def commit(self, ticket: int, arrays: Sequence[np.ndarray], **values: Any) -> bool:
        """Commits a gradient that all servers have; see `Coordinator.commit`."""
        values |= {"worker": self._worker, "ticket": ticket}
        return self._connections[0].call("commit", values, arrays).values["value"]

    def result(self) -> RangeResult:
        """Returns the result of a range; see `Coordinator.result`."""
        answer = self._connections[0].call("result", {"worker": self._worker})
        losses, updates, is_finite, norm = answer.values["value"]
        count = len(losses) if answer.arrays else 0
        made = [Update(*update) for update in updates]
        return RangeResult(losses, made, is_finite, norm, answer.arrays[:count], answer.arrays[count:])

    def gather(self, arrays: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Returns the arrays of each worker that is not lost; all of them must make the same calls in the same order."""
        values = {"key": f"workers/{next(self._gathers)}", "member": self._worker}
        answer = self._connections[0].call("gather", values, arrays)
        self.workers = tuple(answer.values["members"])
        every, count = answer.arrays, len(arrays)
        return [list(every[at : at + count]) for at in range(0, len(self.workers) * count, count)]

    def place(self, weights: Sequence[int], states: Sequence[int], tables: Sequence[int] = ()) -> None:
        """Assigns variables to servers.

        Args:
          weights: bytes of the trained variables.
          states: bytes of those that layers assign.
          tables: numbers of the trained variables that are split by rows over all servers.
        """
        self._tables = list(tables)
        placed = placement_of([*weights, *states], tables, self.count)
        self._weights, self._states = placed[: len(weights)], placed[len(weights) :]

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
          weights: values of the weights that are no tables, by number.
          states: values of the states.
          forms: descriptions of these weights; see `VariableServer.define`.
          tables: descriptions of the tables.
          **options: see `VariableServer.define`.

        Returns:
          Why the servers refuse the optimizer; "" if they do not.
        """

        def of(server: int) -> Message:
            own, own_states = self._of(self._weights, server), self._of(self._states, server)
            values = {"weights": [(number, *forms[number]) for number in own], "states": own_states, **options}
            values |= {"tables": tables, "server": server, "servers": self.count}
            return Message(values, [*(weights[number] for number in own), *(states[number] for number in own_states)])

        return next((answer.values["refused"] for answer in self._call_all("define", of) if answer.values), "")

    def pull(
        self, version: int, ids: Sequence[np.ndarray] = ()
    ) -> tuple[list[int], list[np.ndarray], list[np.ndarray], float]:
        """Returns the version that each server had, at least `version`; the values of weights and states; and a norm.

        The norm is that of the latest gradient of which a norm was requested, over all servers.

        Args:
          version: the least version.
          ids: for each table, the rows to read, of the same version: its value is that of these rows. None are read by default.
        """
        places = [split(each, self.count) for each in ids]

        def rows_of(server: int) -> Message:
            return Message(
                {"version": version}, [self._own(each, at, server) for each, at in zip(ids, places, strict=True)]
            )

        answers = self._call_all("pull", rows_of)
        weights: list[Any] = [None] * len(self._weights)
        states: list[Any] = [None] * len(self._states)
        for server, answer in enumerate(answers):
            arrays = iter(answer.arrays)
            for values, placed in ((weights, self._weights), (states, self._states)):
                for number in self._of(placed, server):
                    values[number] = next(arrays)
            for number, each, at in zip(self._tables, ids, places, strict=False):
                rows = next(arrays)
                if weights[number] is None:
                    weights[number] = np.empty([len(each), rows.shape[1]], rows.dtype)
                weights[number][at[server]] = rows
        return [answer.values["version"] for answer in answers], weights, states, answers[0].values["norm"]

    def push(
        self,
        ticket: int,
        versions: Sequence[int],
        gradients: Sequence[np.ndarray],
        before: Sequence[np.ndarray],
        after: Sequence[np.ndarray],
        *,
        ids: Sequence[np.ndarray] = (),
        with_norm: bool = False,
    ) -> None:
        """Gives every server its gradients, and values of states before and after the forward pass.

        The gradient of a table is that of the rows `ids`, which are distinct.
        """
        places = [split(each, self.count) for each in ids]

        def of(server: int) -> Message:
            own = [gradients[number] for number in self._of(self._weights, server)]
            for number, each, at in zip(self._tables, ids, places, strict=True):
                own += [self._own(each, at, server), gradients[number][at[server]]]
            states = [each for n in self._of(self._states, server) if after for each in (before[n], after[n])]
            values = {"worker": self._worker, "ticket": ticket, "version": versions[server], "with_norm": with_norm}
            return Message(values, [*own, *states])

        self._call_all("push", of)

    def leave_out(self, numbers: Sequence[int]) -> None:
        """Names the weights on which the loss does not depend, which are not updated."""
        self._call_all("leave_out", lambda _: Message({"numbers": list(numbers)}))

    def write(self, values: Mapping[str, np.ndarray], **options: Any) -> None:
        """Assigns values by key, on the servers that hold them; see `VariableServer.write`."""
        self._call_all("write", lambda server: _keyed(self._held(values, server), values, **options))

    def fetch(self, keys: Iterable[str]) -> dict[str, np.ndarray]:
        """Returns values by key, from the first server that holds each."""
        found: dict[str, np.ndarray] = {}
        for server, connection in enumerate(self._connections):
            own = [key for key in self._held(keys, server) if key not in found]
            found |= zip(own, connection.call("fetch", {"keys": own}).arrays, strict=True) if own else ()
        return found

    def read_rows(self, key: str, ids: np.ndarray) -> np.ndarray:
        """Returns rows of a table or of its slots."""
        places = split(ids, self.count)
        answers = self._call_all("read_rows", lambda s: Message({"key": key}, [self._own(ids, places, s)]))
        first = answers[0].arrays[0]
        rows = np.empty([len(ids), *first.shape[1:]], first.dtype)
        for at, answer in zip(places, answers, strict=True):
            rows[at] = answer.arrays[0]
        return rows

    def write_rows(self, key: str, ids: np.ndarray, rows: np.ndarray) -> None:
        """Assigns rows of a table or of its slots."""
        places = split(ids, self.count)
        self._call_all(
            "write_rows", lambda s: Message({"key": key}, [self._own(ids, places, s), np.asarray(rows[places[s]])])
        )

    def _own(self, ids: np.ndarray, places: Sequence[np.ndarray], server: int) -> np.ndarray:
        """Returns the numbers that a server gives to its rows."""
        return (ids[places[server]] // self.count).astype(np.int32)

    def loads(self, weights: Sequence[int], rows: Mapping[int, int]) -> list[int]:
        """Returns the bytes of the trained variables on each server.

        Args:
          weights: bytes of each.
          rows: number of rows of each table.
        """

        def load(server: int) -> int:
            shares = [weights[table] // count * count_rows(count, server, self.count) for table, count in rows.items()]
            return sum(weights[number] for number in self._of(self._weights, server)) + sum(shares)

        return [load(server) for server in range(self.count)]

    def leave(self) -> None:
        """Says that this worker needs the servers no longer, and ends the connections."""
        with contextlib.suppress(PeerLostError):  # a server that is lost
            self._connections[0].call("leave", {"member": self._worker}, seconds=_LEAVING_SECONDS)
        for connection in self._connections:
            connection.close()

    def _held(self, keys: Iterable[str], server: int) -> list[str]:
        placed = {"weight": self._weights, "slot": self._weights, "state": self._states}

        def holds(key: str) -> bool:
            kind, number, *_ = key.split("/")
            return kind not in placed or placed[kind][int(number)] == server

        return [key for key in keys if holds(key)]

    def _call_all(self, method: str, message: Callable[[int], Message]) -> list[Message]:
        """Calls all servers at once, and returns their answers."""
        answers = [
            connection.begin(method, message(number), None) for number, connection in enumerate(self._connections)
        ]
        return [answer() for answer in answers]

    @staticmethod
    def _of(placed: Sequence[int], server: int) -> list[int]:
        return [number for number, found in enumerate(placed) if found == server]


def _keyed(keys: Sequence[str], values: Mapping[str, np.ndarray], **options: Any) -> Message:
    return Message({"keys": keys, **options}, [values[key] for key in keys])


_DTYPES = frozenset([tf.float16, tf.float32, tf.float64, tf.int32, tf.int64])


class WorkerCollectives(Collectives):
    """Every call sends this worker's tensors to the coordinator, and returns those of all workers, added in order of rank.

    A worker that is lost before its call takes no part, and ranks are among those that are left.

    Cost: n sent and n N received by each worker, and a round trip.
    """

    wire = Wire(reduces=_DTYPES, gathers=_DTYPES, packed=tf.int32)

    def __init__(self, servers: Servers, worker: int):
        """Initializes the collectives.

        Args:
          servers: the servers.
          worker: rank of this worker in the job.
        """
        self._servers, self._worker = servers, worker

    @property
    def size(self) -> int:  # type: ignore[override]
        """Number of workers that have taken part in the last call."""
        return len(self._servers.workers)

    @property
    def rank(self) -> int:
        """See base class."""
        return self._servers.workers.index(self._worker)

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class."""

        def reduced(*arrays: np.ndarray) -> list[np.ndarray]:
            return [_reduced(values, op) for values in zip(*self._servers.gather(arrays), strict=True)]

        return self._call(reduced, tensors, [tensor.shape for tensor in tensors])

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """See base class."""

        def gathered(*arrays: np.ndarray) -> list[np.ndarray]:
            return [np.concatenate(values) for values in zip(*self._servers.gather(arrays), strict=True)]

        return self._call(gathered, tensors, [tf.TensorShape([None, *tensor.shape[1:]]) for tensor in tensors])

    @staticmethod
    def _call(function: object, tensors: Sequence[tf.Tensor], shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
        if not tensors:
            return []
        results = tf.numpy_function(function, list(tensors), [tensor.dtype for tensor in tensors])
        return [tf.ensure_shape(result, shape) for result, shape in zip(results, shapes, strict=True)]


def _reduced(values: Sequence[np.ndarray], op: Op) -> np.ndarray:
    total = values[0]
    for value in values[1:]:
        total = np.maximum(total, value) if op == "max" else total + value
    return np.asarray(total / len(values) if op == "mean" else total, values[0].dtype)
