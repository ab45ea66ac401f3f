"""Signatures of the pickled objects that ranks exchange, since unpickling runs code, and the engine authenticates nobody.

A signature is an HMAC-SHA256 under a key of the job. The ranks of a process set exchange nonces before their first object, and
the key depends on all of them: for no rank, an object from before it has started the engine is valid. The operation, the call's
name, its number among the calls with this name, the sender's rank, and the object are signed.

Cost: 32 bytes and about a second per GB on each side; one small all-gather per process set and start of the engine.
"""

import collections
import hmac
import secrets
import threading
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import InputError
from tfdist.horovod.data_movement import allgather
from tfdist.horovod.engine import Engine
from tfdist.horovod.process import engine

SIGNATURE = 32  # bytes
_NONCE = 16  # bytes

_all: weakref.WeakKeyDictionary[Engine, dict[tuple[int, ...], "Signatures"]] = weakref.WeakKeyDictionary()


class Call:
    """One exchange of objects, the same on all ranks that take part; signs and verifies its objects."""

    def __init__(self, key: bytes, operation: str, name: str, number: int):
        """Initializes the call.

        Args:
          key: key of the ranks that take part.
          operation: name of the function.
          name: name of the call.
          number: number of earlier calls with both names.
        """
        self._key, self._name, self._described = key, name, (operation, name, number)

    def signed(self, pickled: bytes, sender: int) -> np.ndarray:
        """Returns a pickled object of rank `sender` behind its signature, as bytes."""
        return np.frombuffer(self._signature(pickled, sender) + pickled, np.uint8)

    def verified(self, received: np.ndarray, sender: int) -> memoryview:
        """Returns the pickled object that rank `sender` has signed; raises `InputError` if it has not signed this."""
        data = memoryview(received.tobytes())
        if not hmac.compare_digest(data[:SIGNATURE], self._signature(data[SIGNATURE:], sender)):
            raise InputError(
                "An object of another rank must be signed with this job's token. Received: another signature, in "
                f"{self._name!r}. Give all processes of a job the same TFDIST_TOKEN, or none; if they do, the "
                "object was altered in transit."
            )
        return data[SIGNATURE:]

    def _signature(self, pickled: bytes | memoryview, sender: int) -> bytes:
        mac = hmac.new(self._key, repr((*self._described, sender)).encode() + b"\0", "sha256")
        mac.update(pickled)
        return mac.digest()


class Signatures:
    """The calls of a process set, from one start of the engine to its end."""

    def __init__(self) -> None:
        """Initializes without calls."""
        self._session = b""  # the ranks and their nonces, once they are exchanged
        self._numbers: collections.Counter[tuple[str, str]] = collections.Counter()
        self._preparing = threading.Lock()

    def next_call(self, operation: str, name: str, process_set: Any) -> Call:
        """Returns the next call of an operation with this name, which all ranks of the set make in the same order.

        At the first call of any operation, the ranks exchange their nonces.
        """
        with self._preparing:
            self._session = self._session or _new_session(process_set)
            number = self._numbers[operation, name]
            self._numbers[operation, name] += 1
        key = hmac.digest(engine().object_key.encode(), self._session, "sha256")
        return Call(key, operation, name, number)


def next_call(operation: str, name: str, process_set: Any) -> Call:
    """Returns the next call on a process set; see `Signatures.next_call`."""
    signatures = _all.setdefault(engine(), {}).setdefault(tuple(process_set.ranks), Signatures())
    return signatures.next_call(operation, name, process_set)


def _new_session(process_set: Any) -> bytes:
    """Returns the ranks of a set and their nonces, which are not authenticated, except for this rank's own."""
    own, ranks = secrets.token_bytes(_NONCE), list(process_set.ranks)
    sent = tf.constant(np.frombuffer(own, np.uint8))
    nonces = allgather(sent, "object_nonces", process_set=process_set).numpy().tobytes()
    place = ranks.index(engine().rank) * _NONCE
    return repr(ranks).encode() + b"\0" + nonces[:place] + own + nonces[place + _NONCE :]
