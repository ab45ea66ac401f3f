"""Options of parameter servers, such as `--staleness`: `sync`, `bounded(4)` or `async(late=scale(0.1))`."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

from tfdist.config.fields import ANY_TEXT, strategy_option
from tfdist.config.spec import parse
from tfdist.errors import InputError, count_of, is_integer, is_number, nearest

SYNC, BACKUP, QUORUM, SSP = "sync", "backup", "quorum", "ssp"
BOUNDED, ASYNC, REPLAY = "bounded", "async", "replay"
APPLY, REJECT, SCALE = "apply", "reject", "scale"
AGAIN, DROPPED = "again", "dropped"
EXACT, LAZY = "exact", "lazy"
BY_SIZE, ROUND_ROBIN, HASH = "by_size", "round_robin", "hash"
MIN_TABLE_BYTES = 256 << 10  # the same as for sparse gradients with other strategies
# Compression methods whose code a server can decode without the code of other workers.
PUSHED_METHODS = ("fp16", "bf16", "int8", "qsgd", "terngrad", "onebit", "signsgd", "topk")

# Parameters of each rule, and an example.
_PARAMETERS = {
    SYNC: ((), SYNC),
    BACKUP: (("workers",), "backup(workers=1)"),
    QUORUM: (("fraction",), "quorum(fraction=0.5)"),
    SSP: (("bound",), "ssp(2)"),
    BOUNDED: (("bound", "late", "pull_every"), "bounded(4)"),
    ASYNC: (("late", "pull_every"), ASYNC),
    REPLAY: (("path",), "replay(runs/async)"),
}
_ONLY_BY_NAME, _WORDS = "late", ("late", "rows", "bound")
_LATE_PARAMETERS = {
    APPLY: ((), APPLY),
    REJECT: (("after", "rows"), "reject(after=8)"),
    SCALE: (("rate",), "scale(0.1)"),
}


@dataclasses.dataclass(frozen=True)
class LateGradients:
    """What happens to a gradient that was computed from old weights."""

    kind: str = APPLY  # "apply", "reject" or "scale"
    after: int = 0  # maximum staleness of a gradient that is not rejected, in updates
    rows: str = AGAIN  # whether the rows of a rejected gradient are used again, "again", or not, "dropped"
    # A gradient with staleness s is multiplied by 1 / (1 + rate s), as in Zhang et al., Staleness-aware Async-SGD
    # (2016), where the rate is 1.
    rate: float = 0.0

    def factor(self, staleness: int) -> float:
        """Returns the factor of a gradient with this staleness in updates; 0 if it is rejected."""
        if self.kind == REJECT:
            return 0.0 if staleness > self.after else 1.0
        return 1 / (1 + self.rate * staleness)

    def __str__(self) -> str:
        if self.kind == REJECT:
            return f"reject(after={self.after}{', rows=dropped' if self.rows == DROPPED else ''})"
        return f"scale({self.rate:g})" if self.kind == SCALE else APPLY


@dataclasses.dataclass(frozen=True)
class Staleness:
    """The rule that determines when gradients are applied."""

    kind: str = SYNC  # "sync", "backup", "quorum", "ssp", "bounded", "async" or "replay"
    # For "bounded", the maximum staleness of a gradient, in updates; for "ssp", the maximum number of steps that a
    # worker is ahead of the slowest one; otherwise None.
    bound: int | None = None
    workers: int = 0  # for "backup", the number of workers for whose shares an update does not wait
    fraction: float = 1.0  # for "quorum", the fraction of the workers for whose shares an update waits
    late: LateGradients = LateGradients()  # what happens to a gradient of old weights
    pull_every: int = 1  # maximum number of steps that a worker computes from the same weights
    path: str = ""  # for "replay", the output directory of the run whose updates are repeated

    def __str__(self) -> str:
        arguments = [str(self.bound)] if self.bound is not None else []
        arguments += [f"workers={self.workers}"] if self.workers else []
        arguments += [f"fraction={self.fraction:g}"] if self.fraction != 1 else []
        arguments += [f"late={self.late}"] if self.late.kind != APPLY else []
        arguments += [f"pull_every={self.pull_every}"] if self.pull_every > 1 else []
        arguments += [self.path] if self.path else []
        return f"{self.kind}({', '.join(arguments)})" if arguments else self.kind

    @property
    def whole_batches(self) -> bool:
        """Whether a worker computes the whole batch of a step, instead of a share."""
        return self.kind in (BOUNDED, ASYNC, REPLAY)

    @property
    def drops_shares(self) -> bool:
        """Whether an update does not wait for the shares of all workers."""
        return self.kind in (BACKUP, QUORUM)

    @property
    def has_server_states(self) -> bool:
        """Whether servers hold the variables that layers assign, because an update may not use all workers."""
        return self.whole_batches or self.drops_shares

    def needed_shares(self, workers: int) -> int:
        """Returns the number of shares for which an update waits, if workers compute shares.

        Raises:
          InputError: with "backup" or "quorum", an update would wait for no share, or for the shares of all workers.
        """
        if not self.drops_shares:
            return workers
        count = math.ceil(self.fraction * workers - 1e-9) - self.workers  # 0.07 * 100 is above 7 in floating point
        if not 0 < count < workers:
            raise InputError(
                f"--staleness={self} must wait for the shares of some workers, but not of all. Received: "
                f"{count_of(workers, 'worker')}. Start more workers, or use --staleness=sync."
            )
        return count


def parse_staleness(text: str) -> Staleness:
    """Parses `--staleness`, such as `sync`, `bounded(4)` or `async(late=reject(after=8), pull_every=4)`."""
    if match := re.fullmatch(rf"\s*{REPLAY}\(\s*[\"']?(.+?)[\"']?\s*\)\s*", text):
        return Staleness(REPLAY, path=match[1])
    name, arguments = _parse_call(text, text, _PARAMETERS)
    if name == REPLAY:
        raise InputError(f"{text} must have the output directory of a run. Write {_PARAMETERS[REPLAY][1]}")
    defaults: dict[str, dict[str, Any]] = {BACKUP: {"workers": 1}, QUORUM: {"fraction": 0.5}}
    defaults |= {SSP: {"bound": None}, BOUNDED: {"bound": None}}
    arguments = {**defaults.get(name, {}), **arguments}
    if "late" in arguments:
        arguments["late"] = _parse_late(arguments["late"], text, name)
    for key in arguments.keys() - {"late"}:
        is_valid, meaning = _RULES[name if key == "bound" else key]
        if not is_valid(arguments[key]):
            example = "pull_every=4" if key == "pull_every" else _PARAMETERS[name][1]
            raise InputError(f"{text} must have {meaning}. Write {example}")
    return Staleness(name, **arguments)


def _at_least(minimum: int) -> Callable[[Any], bool]:
    return lambda value: is_integer(value) and value >= minimum


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    BOUNDED: (_at_least(0), "the maximum staleness in updates, a number of at least 0"),
    SSP: (_at_least(0), "the number of steps that a worker may be ahead, a number of at least 0"),
    "workers": (_at_least(1), "the number of workers whose shares may be missing, at least 1"),
    "fraction": (
        lambda value: is_number(value) and 0 < value < 1,
        "the fraction of the workers whose shares are needed, above 0 and below 1",
    ),
    "pull_every": (_at_least(1), "the number of steps that a worker computes from the same weights, at least 1"),
}


def _parse_late(late_text: str, text: str, name: str) -> LateGradients:
    kind, arguments = _parse_call(str(late_text), text, _LATE_PARAMETERS)
    if kind == REJECT:
        arguments = {"after": 8, **arguments}
        if name != ASYNC or not _at_least(0)(arguments["after"]):
            raise InputError(
                f"{text}: late=reject requires async, and its after must be an integer of at least 0. Write "
                "async(late=reject(after=8))"
            )
        if arguments.get("rows", AGAIN) not in (AGAIN, DROPPED):
            raise InputError(f"{text}: rows must be again or dropped. Write reject(after=8, rows=dropped)")
    rate = arguments.setdefault("rate", 0.1) if kind == SCALE else 0.0
    if not is_number(rate) or not 0 <= rate < math.inf:
        raise InputError(f"{text}: scale must have a rate of at least 0. Write late=scale(0.1)")
    return LateGradients(kind, **arguments)


def _parse_call(
    call_text: str, text: str, parameters: dict[str, tuple[tuple[str, ...], str]]
) -> tuple[str, dict[str, Any]]:
    """Parses `name` or `name(value, key=value)`; values are numbers, or the text of a name or of another call."""
    name, bracket, argument_text = call_text.strip().partition("(")
    if name not in parameters:
        raise InputError(f"{text} is not known.{nearest(name, [example for _, example in parameters.values()])}")
    keys, example = parameters[name]
    if bracket and keys and keys[0] not in _ONLY_BY_NAME and "=" not in argument_text.partition(",")[0]:
        bracket += f"{keys[0]}="
    try:
        arguments = parse(f"{name}{bracket}{argument_text}", _WORDS).args
    except InputError:
        arguments = {"": None}
    if not arguments.keys() <= {*keys}:
        raise InputError(f"{text}: {name} takes {', '.join(keys) or 'no arguments'}. Write {example}")
    return name, arguments


def count_workers(servers: int, processes: int, tf_config_servers: int = 0) -> int:
    """Returns the number of workers of a job, given `--servers` and the number of servers in TF_CONFIG.

    Raises:
      InputError: no process is left for a worker, or TF_CONFIG has a different number of servers.
    """
    if tf_config_servers and servers not in (-1, tf_config_servers):
        raise InputError(
            f"--servers must be the number of parameter servers in TF_CONFIG. Received: --servers={servers}, but "
            f"{tf_config_servers} in TF_CONFIG. Leave out --servers."
        )
    servers = (tf_config_servers or 1) if servers < 0 else servers
    if servers >= processes:
        raise InputError(
            f"A job needs a worker besides its servers. Received: --servers={servers} and {count_of(processes, 'process')}. "
            f"Start more processes: tfdist launch --processes=2 --servers={servers} -- ..."
        )
    return processes - servers


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterServerOptions:
    """Options of parameter servers."""

    servers: int = strategy_option(
        -1,
        "Number of processes that hold variables, for --strategy=parameter_server: the last ones of the job; the others train. "
        "0: process 0 does both. -1: the number in TF_CONFIG or of `tfdist launch --servers`, or 1.",
        minimum=-1,
    )
    staleness: str = strategy_option(
        SYNC,
        "When gradients are applied, for --strategy=parameter_server: sync (those of all workers together), ssp(2) (the same, "
        "but a worker may be 2 steps ahead of the slowest), backup(workers=1) (together, except the slowest worker's), "
        "quorum(fraction=0.5) (together, as soon as half of the workers have gradients), bounded(4) (each gradient alone, at "
        "most 4 updates after its weights were read) or async (no bound). With bounded and async, late=scale(0.1) multiplies a "
        "gradient of staleness s by 1 / (1 + 0.1 s), and with pull_every=4, a worker computes up to 4 steps from the same "
        "weights. async(late=reject(after=8)) repeats steps whose gradients are more than 8 updates old. replay(RUN) repeats "
        "the updates of an earlier run.",
        parse=parse_staleness,
        safe_values=ANY_TEXT,
    )
    sparse_updates: str = strategy_option(
        EXACT,
        "How the optimizer updates embeddings that are split by rows, for --strategy=parameter_server: exact (all rows, as "
        "Keras does) or lazy (only the rows that the batch uses, and their slots; faster, but not exact with momentum).",
        choices=(EXACT, LAZY),
    )
    shard_variables: str = strategy_option(
        BY_SIZE,
        "How variables are assigned to servers, for --strategy=parameter_server: by_size (the largest first, each to the "
        "server with the fewest bytes), round_robin (in the order of the model) or hash (of the variable's path).",
        choices=(BY_SIZE, ROUND_ROBIN, HASH),
    )
    min_table_bytes: int = strategy_option(
        MIN_TABLE_BYTES,
        "Minimum size in bytes of an embedding whose rows are split over the servers, for --strategy=parameter_server: workers "
        "pull and push the rows that they use.",
        minimum=0,
    )
