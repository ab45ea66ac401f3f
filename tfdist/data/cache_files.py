"""Checks the cache files of `tf.data`: each is written by one process, and then read by any number of them."""

import collections
import os
import socket
from typing import Any

from tfdist import keras_internals
from tfdist.coordination import Group
from tfdist.coordination.group import long_timeout
from tfdist.errors import InputError


def check_cache_files(group: Group, *data: Any) -> None:
    """Raises `InputError` on every process if several processes of a host would write the same cache file.

    Every process must call it.
    """
    files = {os.path.abspath(file) for value in data for file in keras_internals.cache_files(value)}
    missing_files = [[socket.gethostname(), file] for file in sorted(files) if not os.path.exists(f"{file}.index")]
    with long_timeout("its data") as deadline:
        missing_by_rank = group.gather("data/caches", missing_files, deadline)
    counts = collections.Counter((host, file) for caches in missing_by_rank for host, file in caches)
    if conflicts := [file for (_, file), count in counts.items() if count > 1]:
        raise InputError(
            "A cache in a file must be written by one process alone. Received: "
            f'cache("{conflicts[0]}") of several processes of a host. Append the rank to its name, or leave the name out, '
            "which caches in memory."
        )
