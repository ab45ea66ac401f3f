"""Files in which `tf.data` caches elements: each is written by one process, and then read by any number of them."""

import collections
import os
import socket
from typing import Any

from tfdist import keras_internals
from tfdist.coordination import Group
from tfdist.coordination.group import long_timeout
from tfdist.errors import InputError


def check_cache_files(group: Group, *data: Any) -> None:
    """Raises `InputError`, on every process, if several of a host would write a cache of `data`; every process must call it."""
    files = {os.path.abspath(file) for each in data for file in keras_internals.cache_files(each)}
    unwritten = [[socket.gethostname(), file] for file in sorted(files) if not os.path.exists(f"{file}.index")]
    with long_timeout("its data") as deadline:
        gathered = group.gather("data/caches", unwritten, deadline)
    counts = collections.Counter((host, file) for caches in gathered for host, file in caches)
    if shared := [file for (_, file), count in counts.items() if count > 1]:
        raise InputError(
            "A cache in a file must be written by one process alone. Received: "
            f'cache("{shared[0]}") of several processes of a host. Append the rank to its name, or leave the name out, '
            "which caches in memory."
        )
