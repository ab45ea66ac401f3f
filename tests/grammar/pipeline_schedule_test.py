"""`--pipeline_schedule`: what it accepts, and what it refuses in one line."""

import pytest

from tfdist.errors import InputError
from tfdist.grammar.pipeline_schedule import (
    ZBH1,
    FromCSV,
    GPipe,
    Interleaved,
    OneFOneB,
    PipeDream,
    TwoBW,
    parse_pipeline_schedule,
)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("gpipe", GPipe()),
        ("1f1b", OneFOneB()),
        ("1f1b()", OneFOneB()),
        ("interleaved", Interleaved(chunks=2)),
        ("interleaved(chunks=4)", Interleaved(chunks=4)),
        ("zb_h1", ZBH1()),
        ("pipedream", PipeDream()),
        ("pipedream(vertical_sync=True)", PipeDream(vertical_sync=True)),
        ("2bw", TwoBW()),
        ("csv:schedule.csv", FromCSV(file="schedule.csv")),
        ("csv:runs/my run/schedule (2).csv", FromCSV(file="runs/my run/schedule (2).csv")),
        ("csv:s3://bucket/schedule.csv", FromCSV(file="s3://bucket/schedule.csv")),
    ],
)
def test_texts(text, wanted):
    assert parse_pipeline_schedule(text) == wanted
    assert parse_pipeline_schedule(str(wanted)) == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a name"),
        ("g-pipe", 'g-pipe is not a known pipeline schedule. Did you mean "gpipe"?'),
        ("1F1B", 'Did you mean "1f1b"?'),
        ("dualpipe", "Known: 1f1b, 2bw, csv:FILE, gpipe, interleaved, pipedream, zb_h1."),
        ("gpipe(chunks=2)", 'gpipe has no parameter "chunks".'),
        ("interleaved(2)", "expected key=value"),
        ("interleaved(chunks=1)", "at least 2. Received: 1. With one part, write 1f1b."),
        ("interleaved(chunks=2.0)", "at least 2. Received: 2.0."),
        ("interleaved(chunks=True)", "at least 2. Received: True."),
        ("csv", "csv must name a file. Write csv:schedule.csv"),
        ("csv: ", "must name a file. Write csv:schedule.csv"),
    ],
)
def test_wrong_texts(text, message):
    with pytest.raises(InputError) as error:
        parse_pipeline_schedule(text)
    assert message in str(error.value) and "\n" not in str(error.value)
