"""The fields of records, and the file that has them."""

import json
import math
import re

import numpy as np
import pytest

from tfdist.errors import InputError
from tfdist.reporting import RunPlan, schema
from tfdist.reporting.reporter import MetricsFile
from tfdist.reporting.schema import EVAL, FIELDS, SCHEMA, TRAIN, metrics_of
from tfdist.reporting.timing import StepTimer, compare_ranks, cost_of_slowest


def test_the_documented_line_has_the_fields_of_the_table_and_the_current_version():
    assert schema.__doc__
    line = json.JSONDecoder().raw_decode(schema.__doc__, schema.__doc__.index('{"schema"'))[0]
    fields = {name for name, field in schema.FIELDS.items() if schema.EVAL in field.kinds}
    assert set(line) - set(schema.metrics_of(line)) == fields
    assert list(schema.metrics_of(line)) == ["accuracy"]
    assert (line["kind"], line["schema"]) == (schema.EVAL, schema.SCHEMA)


def test_every_field_has_a_meaning_and_a_time_or_size_its_unit():
    for name, field in schema.FIELDS.items():
        assert field.meaning
        assert set(field.kinds) <= {schema.TRAIN, schema.EVAL}
        assert field.unit == "bytes" or not name.endswith("_bytes")
        assert field.unit == "s" or not re.search("_seconds(_|$)", name)


def test_a_metric_with_the_name_of_a_field_is_refused():
    schema.check_metric_names(["accuracy", "top_5_accuracy"])
    with pytest.raises(InputError, match=r"Received: loss, time\.") as caught:
        schema.check_metric_names(["loss", "accuracy", "time"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (np.bool_(True), True),
        ("text", "text"),
        (3, 3),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.array(0.5), 0.5),
        (math.nan, "nan"),
        (np.float32("inf"), "inf"),
        (-math.inf, "-inf"),
        ({"a": (1, math.nan)}, {"a": [1, "nan"]}),
    ],
    ids=repr,
)
def test_any_number_becomes_json_of_the_right_type(value, expected):
    plain = schema.to_json(value)
    assert plain == expected
    assert type(plain) is type(expected)
    json.dumps(plain, allow_nan=False)


def test_what_json_does_not_have_is_an_error():
    with pytest.raises(TypeError, match="object"):
        schema.to_json({"x": object()})


@pytest.mark.parametrize("value", [math.inf, -math.inf, 0.25, 7])
def test_numbers_are_read_back_as_they_were_written(value):
    assert schema.as_float(schema.to_json(value)) == value


def test_reading_knows_nan_and_what_is_no_number():
    read = schema.as_float("nan")
    assert read is not None and math.isnan(read)
    assert [schema.as_float(value) for value in (None, True, "train", [1.0])] == [None] * 4


HEADER = {"step": 2, "epoch": 0.5, "time": 1770000000.0, "loss": np.float32(0.5), "accuracy": 0.75}


def training_record() -> dict:
    """Returns a record with every field, from the code that measures them."""
    timer = StepTimer(batch_size=4, clock=iter([0.0, 3.0]).__next__)
    with timer.call(steps=2):
        pass
    timer.add_inner_times(wait_seconds=0.5, busy_seconds=1.0)
    own = timer.own_seconds
    return {
        "kind": TRAIN,
        **HEADER,
        "learning_rate": 0.1,
        **timer.window(),
        **compare_ranks([own, own]),
        "slowest_rank_cost": cost_of_slowest([own, own], 1.5),
        "gradient_norm": 1.0,
        "loss_scale": 1024.0,
        "skipped_steps": 1,
        "payload_bytes": 400,
        "message_bytes": 100,
        "compression_ratio": 2.0,
        "replica_divergence": 0.5,
        "staleness": 0.5,
        "max_staleness": 2.0,
        "staleness_histogram": [{"0": 1, "2": 1}],
        "workers": [{"updates": 2, "wait_seconds": {"pull": 0.5, "push": "nan"}}],
        "servers": [{"pulled_bytes": 7}, {"pulled_bytes": 8}],
        "dropped_rows": 16,
        "total_dropped_rows": 320,
        "rejected_gradients": 1,
        "total_rejected_gradients": 3,
        "exposed_communication_seconds": 0.5,
        "codec_seconds": 0.25,
        "compression_error": 0.5,
        "compression_cosine": 0.5,
        "optimizer_state_bytes": 1 << 10,
        "peak_memory_bytes": 1 << 20,
        "device_peak_memory_bytes": 1 << 20,
    }


@pytest.mark.parametrize("record", [training_record(), {"kind": EVAL, **HEADER}], ids=[TRAIN, EVAL])
def test_what_is_written_is_what_the_table_says(tmp_path, record):
    path = tmp_path / "metrics.jsonl"
    reporter = MetricsFile(path)
    reporter.record(record)
    reporter.close("done")
    written = json.loads(path.read_text())
    fields = {name for name, field in FIELDS.items() if record["kind"] in field.kinds}
    assert set(written) - set(metrics_of(written)) == fields
    assert metrics_of(written) == {"accuracy": 0.75}
    assert written["schema"] == SCHEMA
    assert {name: written[name] for name in record} == record


def test_the_numbers_of_workers_and_servers_are_plotted_by_name():
    plotted = dict(schema.scalars(training_record()))
    nested = {name: value for name, value in plotted.items() if "/" in name}
    assert math.isnan(nested.pop("workers/0/wait_seconds/push"))
    assert nested == {
        "workers/0/updates": 2,
        "workers/0/wait_seconds/pull": 0.5,
        "servers/0/pulled_bytes": 7,
        "servers/1/pulled_bytes": 8,
    }
    assert plotted["accuracy"] == 0.75 and not {"step", "kind", "staleness_histogram"} & plotted.keys()


def test_a_line_is_in_the_file_as_soon_as_it_is_recorded(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reporter = MetricsFile(path)
    assert path.read_text() == ""
    reporter.start(RunPlan(total_steps=2, batch_size=4))
    reporter.progress(1, {"loss": 1.0})
    reporter.record({"kind": TRAIN, "step": 1})
    assert path.read_text().endswith("}\n")
    reporter.record({"kind": TRAIN, "step": 2})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    reporter.close("killed")
