"""Comparison of values over the members of a group that are too large to be sent unless they differ."""

import hashlib
import json

from tfdist.coordination.group import Group, Json


def all_equal(group: Group, name: str, value: Json, deadline: float = 60.0) -> bool:
    """Returns whether every member passes the same value; only a digest of it is sent.

    Args:
      group: the members that are compared; all must call this function.
      name: name of the operation, the same on every member.
      value: of any size; mappings must have their keys in the same order.
      deadline: seconds to wait.

    Raises:
      PeerLostError: see `Group.gather`.
    """
    digest = hashlib.sha256(json.dumps(value).encode()).hexdigest()
    return len(set(group.gather(name, digest, deadline))) == 1
