import dataclasses
import io
import logging
import re
import sys

import pytest
from rich.console import Console

from tests.cluster.terminal_test import Terminal
from tfdist.reporting import RunPlan, python_logging
from tfdist.reporting.display import BarText, TerminalReporter, terminal_or_plain
from tfdist.reporting.plain_reporter import PlainReporter

PLAN = RunPlan(total_steps=500, batch_size=64, examples_per_epoch=1437)


@pytest.fixture(autouse=True)
def capable_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def screen():
    return Terminal()


@pytest.fixture
def reporter(screen, clock):
    return TerminalReporter(Console(file=screen, force_terminal=True, width=100), clock)


def drawn(screen: io.StringIO) -> list[str]:
    """Returns the drawn lines in order, without codes for color and cursor."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    return [part for part in re.split(r"[\r\n]+", text) if part]


def test_the_bar_has_every_field(reporter, screen, clock):
    reporter.start(PLAN)
    for step in (10, 20, 30):
        clock.now += 1.0
        reporter.progress(step, {"loss": 1.25, "accuracy": 0.5, "recall": 0.1})
    bar = drawn(screen)[-1]
    values = r"0:03, 0:47 left  loss 1\.2500  accuracy 0\.5000  640\.00 examples/s"
    assert re.fullmatch(rf"epoch 2/23  step 30/500 ━{{6,}} {values}", bar), bar
    assert len(bar) == 100
    reporter.close("done")


@pytest.mark.parametrize(
    ("width", "bar"),
    [
        (
            160,
            r"epoch 14/23  step 300/500 ━+ 0:01, 0:00 left  loss 1\.2500  accuracy 0\.5000  25600 examples/s"
            r"  sent 83\.9 KiB  comm 12%",
        ),
        (110, r"epoch 14/23  step 300/500 ━+ 0:01, 0:00 left  loss 1\.2500  accuracy 0\.5000  25600 examples/s"),
        (80, r"epoch 14/23 300/500 ━+ 0:01<0:00 loss 1\.2500 accuracy 0\.5000 25600 ex/s"),
        (74, r"epoch 14/23 300/500 0:01<0:00 loss 1\.2500 accuracy 0\.5000 25600 ex/s"),
        (60, r"epoch 14/23 300/500 ━+ 0:01<0:00 loss 1\.2500 25600 ex/s"),
        (45, r"epoch 14/23 300/500 0:01<0:00 loss 1\.2500"),
        (20, r"300/500 loss 1\.2500"),
        (8, r"300/500"),
        (4, r"300/"),
    ],
)
def test_a_narrow_bar_leaves_out_what_comes_last(width, bar, screen, clock):
    reporter = TerminalReporter(Console(file=screen, force_terminal=True, width=width), clock)
    reporter.start(dataclasses.replace(PLAN, shows_communication=True))
    sent = {"payload_bytes": 85900.0, "exposed_communication_seconds": 0.12, "step_seconds": 1.0}
    for step in (100, 200, 300):
        clock.now += 0.25
        reporter.progress(step, {"loss": 1.25, "accuracy": 0.5, "recall": 0.1} | sent)
    last = drawn(screen)[-1]
    reporter.close("done")
    assert re.fullmatch(bar, last), last
    assert len(last) <= width


def test_values_that_change_their_length_do_not_bring_back_what_was_left_out(clock):
    text = BarText(PLAN, clock)
    text.update(10, {"loss": 1234567.0, "accuracy": 0.5})
    assert "accuracy" not in str(text.line(54))
    text.update(20, {"loss": 1.0, "accuracy": 0.5})
    assert "accuracy" not in str(text.line(54))
    assert "accuracy" in str(text.line(55))


def test_the_description_is_above_the_bar(reporter, screen):
    reporter.start(dataclasses.replace(PLAN, description={"model": "mlp", "batch": "64 [examples]"}))
    assert drawn(screen)[:2] == ["model  mlp", "batch  64 [examples]"]
    reporter.close("done")


def test_it_is_drawn_on_a_terminal_by_moving_the_cursor(reporter, screen, clock):
    reporter.start(PLAN)
    clock.now += 1.0
    reporter.progress(10, {"loss": 1.0})
    assert "\r\x1b[2K" in screen.getvalue()
    assert "\x1b[?25l" in screen.getvalue(), "the cursor is hidden while the bar is up"
    reporter.close("done")
    assert screen.getvalue().rindex("\x1b[?25h") > screen.getvalue().rindex("\x1b[?25l")


def test_progress_is_cheap_between_two_draws(reporter, screen, clock):
    reporter.start(PLAN)
    size = len(screen.getvalue())
    for step in range(1, 100):
        clock.now += 0.0005
        reporter.progress(step, {"loss": 1.0})
    assert len(screen.getvalue()) == size
    clock.now += 0.1
    reporter.progress(100, {"loss": 1.0})
    assert "step 100/500" in drawn(screen)[-1]
    reporter.close("done")


def test_evaluations_stay_and_training_windows_only_move_the_bar(reporter, screen, clock):
    reporter.start(PLAN)
    reporter.record({"kind": "train", "step": 100, "loss": 0.75})
    reporter.record({"kind": "eval", "step": 100, "loss": 0.5, "accuracy": 0.9})
    reporter.close("done")
    lines = drawn(screen)
    assert "step 100/500  epoch 5/23  eval  loss 0.5000  accuracy 0.9000" in lines
    assert not [text for text in lines if "train" in text]
    assert any("step 100/500" in text and "loss 0.7500" in text for text in lines)
    assert lines[-1] == "run ended: done"


def test_a_run_that_continues_starts_where_it_was(reporter, screen):
    reporter.start(RunPlan(total_steps=500, batch_size=64, first_step=250))
    assert "step 250/500" in drawn(screen)[-1]
    reporter.close("done")


def test_missing_fields_and_odd_values_leave_the_bar_standing(reporter, screen, clock):
    reporter.start(PLAN)
    clock.now += 1.0
    reporter.progress(10, {})
    assert re.fullmatch(r"epoch 1/23  step 10/500 ━+ 0:01, -:-- left", drawn(screen)[-1])
    reporter.record({"kind": "train"})
    reporter.record({"kind": "eval"})
    clock.now += 1.0
    reporter.progress(20, {"loss": float("nan"), "[red]odd[/nonsense]": 1.0})
    assert "loss nan [red]odd[/nonsense] 1.0000" in drawn(screen)[-1]
    reporter.close("[bold]broken[/oops]\n")
    assert drawn(screen)[-1].startswith("run ended: [bold]broken[/oops]")


def test_an_evaluation_alone_needs_no_bar(reporter, screen):
    reporter.record({"kind": "eval", "step": 7, "loss": 0.5})
    reporter.close("done")
    assert drawn(screen) == ["step 7  eval  loss 0.5000", "run ended: done"]


def test_a_log_line_appears_above_the_bar(screen, clock, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stderr", screen)
    with python_logging.setup(0, tmp_path / "rank-0.log"):
        reporter = terminal_or_plain(screen)
        reporter.start(PLAN)
        logging.getLogger("tfdist.test").info("halfway")
        reporter.close("done")
        assert id(sys.stderr) == id(screen)
    lines = drawn(screen)
    where = next(number for number, text in enumerate(lines) if text.endswith("INFO rank 0: halfway"))
    assert lines[where + 1].startswith("epoch 1/23  step 0/500")


def test_a_stream_that_is_no_terminal_is_not_drawn_on(monkeypatch, screen):
    elsewhere = io.StringIO()
    monkeypatch.setattr(sys, "stdout", elsewhere)
    reporter = terminal_or_plain(screen)
    reporter.start(PLAN)
    print("result")
    reporter.close("done")
    assert elsewhere.getvalue() == "result\n"


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"])
def test_a_pipe_gets_plain_lines_whatever_the_environment_asks(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    stream = io.StringIO()
    reporter = terminal_or_plain(stream)
    reporter.start(PLAN)
    reporter.progress(1, {"loss": 1.0})
    reporter.record({"kind": "train", "step": 1, "loss": 1.0})
    reporter.close("done")
    assert isinstance(reporter, PlainReporter)
    assert stream.getvalue() == "step 1/500  epoch 1/23  train  loss 1.0000\nrun ended: done\n"


def test_a_terminal_without_a_cursor_gets_plain_lines(monkeypatch, screen):
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(terminal_or_plain(screen), PlainReporter)
