"""The schema of metrics.jsonl: each line is a JSON object, the record of a training window or an evaluation.

A training window consists of the steps since the previous training record. The record of an evaluation:

    {"schema": 1, "kind": "eval", "step": 100, "epoch": 4.45, "time": 1770000001.5, "loss": 0.12, "accuracy": 0.97}

`FIELDS` defines the fields. Every other key is the name of a metric, such as `accuracy`, which is the same in both kinds of
record. `schema`, `kind` and `step` are always present; other fields are omitted if unknown, such as
`device_peak_memory_bytes` without a GPU, and `loss_scale` without loss scaling.

Fields that compare ranks exclude collectives, in which ranks wait for one another and a slow rank would affect all times.

JSON has no infinite numbers or NaN; these are the strings "nan", "inf" or "-inf". Python's `float()` accepts numbers and these
strings.

The version is increased when a field is renamed, removed, or changes its meaning, but not for a new field.
"""

import dataclasses
import math
import numbers
import re
from collections.abc import Iterable, Iterator, Mapping

from tfdist.coordination import Json
from tfdist.errors import InputError

SCHEMA = 1
TRAIN = "train"
EVAL = "eval"
_ALL_KINDS = (TRAIN, EVAL)
_NOT_PLOTTED = ("schema", "kind", "step", "time")
_EXPERT_METRIC = re.compile(r"_expert_\d+$")  # see `tfdist.layers.MixtureOfExperts`


@dataclasses.dataclass(frozen=True)
class Field:
    """Definition of a field."""

    unit: str  # unit of the value; empty for text and for numbers without a unit
    meaning: str
    kinds: tuple[str, ...] = (TRAIN,)  # kinds of record that have it


FIELDS: Mapping[str, Field] = {
    "schema": Field("", "version of this schema", _ALL_KINDS),
    "kind": Field("", "`train`: a training window; `eval`: an evaluation of the whole test set", _ALL_KINDS),
    "step": Field("updates", "optimizer updates at the time of the record", _ALL_KINDS),
    "epoch": Field("epochs", "training examples used so far, over the size of the training set", _ALL_KINDS),
    "time": Field("s", "time of the record, in seconds since 1970 (UTC)", _ALL_KINDS),
    "loss": Field("", "mean over the window's global batches, or over the test set, including penalties", _ALL_KINDS),
    "learning_rate": Field("", "the optimizer's learning rate at the window's last step"),
    "examples_per_second": Field("examples/s", "examples of all replicas over the window's wall time"),
    "step_seconds": Field("s", "wall time of a step on the chief, including waiting for data: mean of the window"),
    "step_seconds_min": Field("s", "shortest time of a rank for its own input and gradients: mean of the window"),
    "step_seconds_max": Field("s", "longest time of a rank for its own input and gradients: mean of the window"),
    "slowest_rank": Field("rank", "the rank with `step_seconds_max`; the lowest if there are several"),
    "slowest_rank_cost": Field("", "fraction of a step for which the other ranks wait for `slowest_rank`"),
    "data_wait_seconds": Field("s", "time a step waited for its input on the chief: mean of the window"),
    "gradient_norm": Field("", "global norm of the reduced gradients, before clipping, at the last step"),
    "loss_scale": Field("", "loss scale after the window's last step"),
    "skipped_steps": Field("steps", "steps of the window without an update, because a gradient overflowed"),
    "payload_bytes": Field(
        "bytes", "data that the chief passes to the engine in a step: gradients of its replica, and `message_bytes`"
    ),
    "message_bytes": Field("bytes", "part of `payload_bytes` that is sent to other stages of a pipeline"),
    "compression_ratio": Field("", "size of the gradients over the size of the data sent for their sum"),
    "staleness": Field(
        "updates",
        "age of the weights of a gradient: mean over all parameters in pipelines without a flush, or over the window's "
        "updates with parameter servers",
    ),
    "max_staleness": Field(
        "updates", "the largest age of the weights of a gradient of the window with parameter servers"
    ),
    "staleness_histogram": Field(
        "updates", "for each parameter server, number of the window's updates by the age of its weights"
    ),
    "workers": Field(
        "",
        "for each worker of parameter servers: its `updates` of the window, `updates_per_second` and "
        "`examples_per_second`, `compute_seconds`, and `wait_seconds` for `data`, other `workers`, and `pull` and `push`",
    ),
    "servers": Field(
        "",
        "for each parameter server: `pulled_bytes` and `pushed_bytes` of all workers in the window, and "
        "`update_seconds`, in which it applied updates",
    ),
    "dropped_rows": Field(
        "examples", "examples of the window's batches that no update used, because their worker was late for it"
    ),
    "total_dropped_rows": Field("examples", "`dropped_rows` of all windows of the run"),
    "rejected_gradients": Field(
        "gradients", "gradients that parameter servers rejected in the window, because they were too old"
    ),
    "total_rejected_gradients": Field("gradients", "`rejected_gradients` of all windows of the run"),
    "replica_divergence": Field(
        "", "distance of the replicas' weights to their mean, over the norm of the mean, before the last exchange"
    ),
    "exposed_communication_seconds": Field(
        "s", "time of a step minus the time of one that sends nothing, last measured"
    ),
    "codec_seconds": Field("s", "time of a step for encoding and decoding, last measured without communication"),
    "compression_error": Field("", "largest ||sent - exact|| / ||exact|| of any gradient, last measured"),
    "compression_cosine": Field("", "smallest cosine of the sent and the exact gradient, last measured"),
    "optimizer_state_bytes": Field("bytes", "optimizer state of the chief's process, if it is sharded"),
    "peak_memory_bytes": Field("bytes", "peak resident memory of the chief's process"),
    "device_peak_memory_bytes": Field("bytes", "peak memory allocated on one of the chief's devices"),
}


def metrics_of(record: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the metrics of a record, which are all values not in `FIELDS`, in order."""
    return {name: value for name, value in record.items() if name not in FIELDS}


def main_metrics(record: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the metrics to display: all except those of single experts, of which there may be hundreds."""
    return {name: value for name, value in metrics_of(record).items() if not _EXPERT_METRIC.search(name)}


def check_metric_names(names: Iterable[str]) -> None:
    """Raises `InputError` if a metric has the name of a field, which it would overwrite in its record."""
    reserved_names = [name for name in names if name in FIELDS]
    if reserved_names:
        raise InputError(
            f"A metric must not have the name of a field of metrics.jsonl. Received: {', '.join(reserved_names)}. "
            "Rename the metric: keras.metrics.Mean(name=...)."
        )


def scalars(record: Mapping[str, Json]) -> Iterator[tuple[str, float]]:
    """Yields the names and values of all numbers to plot; a nested one has a name such as `workers/0/wait_seconds/pull`."""
    for name, value in record.items():
        if name in ("workers", "servers"):
            yield from _nested_scalars(name, value)
        elif name not in _NOT_PLOTTED and (scalar := as_float(value)) is not None:
            yield name, scalar


def _nested_scalars(name: str, value: Json) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _nested_scalars(f"{name}/{key}", item)
    elif (scalar := as_float(value)) is not None:
        yield name, scalar


def to_json(value: object) -> Json:
    """Converts a value of a record to JSON: numbers to Python's types, NaN and inf to strings; raises `TypeError`."""
    match value:
        case None | bool() | str():
            return value
        case numbers.Integral():
            return int(value)
        case numbers.Real():
            number = float(value)
            return number if math.isfinite(number) else str(number)
        case Mapping():
            return {str(key): to_json(item) for key, item in value.items()}
        case list() | tuple():
            return [to_json(item) for item in value]
    if getattr(value, "shape", None) == () and hasattr(value, "__array__"):
        return to_json(value.__array__().item())
    raise TypeError(f"A record holds numbers, text, lists and mappings. Received: {value!r} of type {type(value)}.")


def as_float(value: object) -> float | None:
    """Returns a record's value as a float, including "nan", "inf" and "-inf"; None if it is not a number."""
    json_value = to_json(value)
    if isinstance(json_value, bool) or not isinstance(json_value, int | float | str):
        return None
    try:
        return float(json_value)
    except (ValueError, OverflowError):
        return None
