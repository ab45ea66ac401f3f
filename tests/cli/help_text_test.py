"""The format of help texts."""

from tfdist.cli import help_text

_WHOLE = """\
Usage: python -m tfdist.own [--flag=value ...] -- COMMAND

Does what it does.

Shape:
  --width     How wide it is. (default: 3)
  --[no]tall  Whether it is more high than it is
              wide.

Flags:
  --name      Its name."""


def test_renders_topics():
    topics = {
        "Shape": [
            ("--width", "How wide it is. (default: 3)"),
            ("--[no]tall", "Whether it is more high than it is wide."),
        ],
        "Flags": [("--name", "Its name.")],
    }
    assert help_text.render("python -m tfdist.own", topics, "Does what it does.", "-- COMMAND", width=50) == _WHOLE


def test_renders_flags_alone():
    assert help_text.render("own", {"Flags": [("--name", "Its name.")]}) == (
        "Usage: own [--flag=value ...]\n\nFlags:\n  --name  Its name."
    )
