"""Options of parameter servers, such as `--staleness`: `sync`, `bounded(4)` or `async`."""

import dataclasses
import re

from tfdist.config.fields import ANY_TEXT, DEVICES, flag_field
from tfdist.errors import InputError
from tfdist.errors.formatting import count_of, nearest

SYNC, BOUNDED, ASYNC = "sync", "bounded", "async"
EXACT, LAZY = "exact", "lazy"
BY_SIZE, ROUND_ROBIN, HASH = "by_size", "round_robin", "hash"
MIN_TABLE_BYTES = 256 << 10  # as for sparse gradients with other strategies
_FORMS = (SYNC, f"{BOUNDED}(4)", ASYNC)


@dataclasses.dataclass(frozen=True)
class Staleness:
    """The rule that determines when gradients are applied.

    Attributes:
      kind: "sync", "bounded" or "async".
      bound: maximum staleness of a gradient, in updates; None unless `kind` is "bounded".
    """

    kind: str = SYNC
    bound: int | None = None

    def __str__(self) -> str:
        return self.kind if self.bound is None else f"{self.kind}({self.bound})"


def parse_staleness(text: str) -> Staleness:
    """Parses `sync`, `bounded(4)` or `async`.

    Raises:
      InputError: `text` has another form, or the bound is not an integer of at least 0.
    """
    match = re.fullmatch(r"\s*(\w*)\s*(?:\((.*)\))?\s*", text)
    name, argument = (match[1], match[2]) if match else (text, None)
    if name in (SYNC, ASYNC):
        if argument is not None:
            raise InputError(f"{text}: {name} has no arguments. Write {name}")
        return Staleness(name)
    if name != BOUNDED:
        raise InputError(f"{text} is not known.{nearest(name, _FORMS)}")
    bound_text = (argument or "").strip()
    if not bound_text.isdecimal():
        raise InputError(
            f"{text} must have the maximum staleness in updates, a number of at least 0. Write {BOUNDED}(4)"
        )
    return Staleness(BOUNDED, int(bound_text))


def count_workers(servers: int, processes: int, tf_config_servers: int = 0) -> int:
    """Returns the number of workers of a job, given `--servers` and the number of servers in TF_CONFIG.

    Raises:
      InputError: no process is left for a worker, or TF_CONFIG has another number of servers.
    """
    if tf_config_servers and servers not in (-1, tf_config_servers):
        raise InputError(
            f"--servers must be the number of parameter servers in TF_CONFIG. Received: --servers={servers} and "
            f"{tf_config_servers}. Leave it out."
        )
    servers = (tf_config_servers or 1) if servers < 0 else servers
    if servers >= processes:
        raise InputError(
            f"A job needs a worker besides its servers. Received: --servers={servers} and {count_of(processes, 'process')}. "
            f"Start more: tfdist launch --processes=2 --servers={servers} -- ..."
        )
    return processes - servers


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterServerOptions:
    """Options of parameter servers."""

    servers: int = flag_field(
        -1,
        DEVICES,
        "Number of processes that hold variables, for --strategy=parameter_server: the last ones of the job; the others train. "
        "0: process 0 does both. -1: the number in TF_CONFIG or of `tfdist launch --servers`, or 1.",
        minimum=-1,
        is_option=True,
        neutral_values=(-1,),
    )
    staleness: str = flag_field(
        SYNC,
        DEVICES,
        "When gradients are applied, for --strategy=parameter_server: sync (the gradients of all workers together), bounded(4) "
        "(each gradient alone, at most 4 updates after its weights were read) or async (no bound).",
        parse=parse_staleness,
        is_option=True,
        neutral_values=(SYNC,),
        safe_values=ANY_TEXT,
    )
    sparse_updates: str = flag_field(
        EXACT,
        DEVICES,
        "How the optimizer updates embeddings that are split by rows, for --strategy=parameter_server: exact (all rows, as "
        "Keras does) or lazy (only the rows that the batch uses, and their slots; faster, but not exact with momentum).",
        choices=(EXACT, LAZY),
        is_option=True,
        neutral_values=(EXACT,),
    )
    shard_variables: str = flag_field(
        BY_SIZE,
        DEVICES,
        "Which server has which variable, for --strategy=parameter_server: by_size (the largest first, each where the fewest "
        "bytes are), round_robin (in turn, in the order of the model) or hash (of the variable's path).",
        choices=(BY_SIZE, ROUND_ROBIN, HASH),
        is_option=True,
        neutral_values=(BY_SIZE,),
    )
    min_table_bytes: int = flag_field(
        MIN_TABLE_BYTES,
        DEVICES,
        "Minimum size of an embedding whose rows are split over the servers, for --strategy=parameter_server: workers pull "
        "and push the rows that they use.",
        minimum=0,
        is_option=True,
        neutral_values=(MIN_TABLE_BYTES,),
    )
