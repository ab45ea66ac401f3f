"""The output and the exit code of a command, for every way in which it can end."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
from absl import flags as absl_flags

from tfdist.cli import command, flags
from tfdist.config.train_config import TrainConfig, VerifyConfig
from tfdist.errors import InputError, NotFiniteError, PeerLostError


def _run(call, *argv, **more):
    return command.run("train", flags.define, call, ["program", *argv], **more)


def _raiser(error):
    def call(values):
        raise error

    return call


def _only_line(capsys):
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (1, 1), (75, 75)])
def test_returns_the_command_s_code(returned, code):
    assert _run(lambda values: returned) == code


def test_arguments_behind_the_flags():
    seen = []

    def call(rest, values):
        seen.append((values.steps, rest))

    theirs = ["python", "--steps=4", "--help", "--flagfile=none"]
    assert _run(call, "--steps=3", "--", *theirs, arguments="-- COMMAND") == 0
    assert _run(call, *theirs, arguments="-- COMMAND") == 0
    assert seen == [(3, theirs), (0, theirs)]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("Rule.\n  Received: 3."), 2, "tfdist train: Rule. Received: 3."),
        (NotFiniteError("Step 7."), 3, "tfdist train: Step 7."),
        (PeerLostError("Rank 1."), 5, "tfdist train: Rank 1."),
        (KeyboardInterrupt(), 130, "tfdist train: Interrupted."),
    ],
)
def test_errors_with_a_code_are_one_line(capsys, error, code, line):
    assert _run(_raiser(error)) == code
    assert _only_line(capsys) == line


def test_other_errors_keep_their_traceback(capsys):
    error = ZeroDivisionError("by zero")
    assert _run(_raiser(error)) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("Traceback (most recent call last):")
    assert captured.err.endswith(f"{type(error).__name__}: {error}\n")


def test_any_other_error_goes_to_the_hook_which_may_exit(capsys, monkeypatch):
    error, hooked = ValueError("in the program"), []
    monkeypatch.setattr(sys, "excepthook", lambda *arguments: hooked.append(arguments))
    assert _run(_raiser(error)) == 1
    assert hooked == [(ValueError, error, error.__traceback__)]
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys, "excepthook", lambda *arguments: sys.exit(7))
    with pytest.raises(SystemExit, match="7"):
        _run(_raiser(error))
    assert _run(_raiser(InputError("No."))) == 2


def test_an_exit_passes_through():
    with pytest.raises(SystemExit, match="4"):
        _run(_raiser(SystemExit(4)))


def test_lack_of_memory_is_code_6(capsys):
    error = MemoryError("Unable to allocate 6.9 GiB for an array")
    assert _run(_raiser(error)) == 6
    assert "Out of memory: tried to allocate 6.9 GiB. Lower --batch_size" in _only_line(capsys)


@pytest.mark.parametrize("argument", ["--help", "-h", "-help", "--helpfull", "--helpshort"])
def test_help(capsys, argument):
    call = _raiser(AssertionError("the command ran"))
    assert _run(call, "--batch_size=3", argument, "--xyzzy", about="Trains a model.", arguments="-- COMMAND") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[0] == "Usage: tfdist train [--flag=value ...] -- COMMAND"
    assert lines[2] == "Trains a model."
    assert [line for line in lines if line.endswith(":") and not line.startswith(" ")] == [
        "Model and data:",
        "Duration:",
        "Strategy and devices:",
        "Training:",
        "Gradients:",
        "Output and checkpoints:",
        "Checks:",
        "Common flags:",
    ]
    assert "--helpfull" not in captured.out


def test_help_ends_with_the_examples(capsys):
    examples = ["tfdist train --steps=3", f"tfdist train {'--steps=3 ' * 20}"]
    assert _run(_raiser(AssertionError()), "--help", examples=examples) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == ["Examples:", *(f"  {example}" for example in examples)]


def test_help_without_flags_names_no_files_with_flags(capsys):
    assert command.run("ledger", lambda values: None, _raiser(AssertionError()), ["program", "--help"]) == 0
    shown = "Usage: tfdist ledger\n\nCommon flags:\n  --help  Show this help.\n"
    assert capsys.readouterr().out == shown


def test_flags_without_effect_are_named_only(capsys):
    assert command.run("verify", VerifyConfig, _raiser(AssertionError()), ["program", "--help"]) == 0
    out = capsys.readouterr().out
    assert "Interval between checkpoints" not in out
    assert "--checkpoint_every, --keep, --checkpoint_async" in " ".join(out.split())
    assert command.run("verify", VerifyConfig, lambda config: None, ["program", "--checkpoint_every=3"]) == 0


def test_help_as_data(capsys):
    assert _run(_raiser(AssertionError()), "--helpjson", about="Trains.", examples=["one"]) == 0
    described = json.loads(capsys.readouterr().out)
    own = {flag.pop("name"): flag for flag in described.pop("flags")}
    assert described == {"name": "train", "about": "Trains.", "arguments": "", "examples": ["one"]}
    assert own.keys() == {field.name for field in dataclasses.fields(TrainConfig)}
    assert own["precision"] == {
        "topic": "Training",
        "help": own["precision"]["help"],
        "default": "float32",
        "type": "string",
        "boolean": False,
        "choices": ["float32", "mixed_bfloat16", "mixed_float16"],
    }
    assert own["jit_compile"]["boolean"]


def test_flags_without_a_topic_have_a_group(capsys):
    def define(values):
        absl_flags.DEFINE_integer("width", 3, "How wide.", flag_values=values)
        absl_flags.DEFINE_boolean("tall", False, "Whether tall.", flag_values=values)
        absl_flags.DEFINE_string("name", "", "Its name.", flag_values=values, module_name="Names")

    assert command.run("own", define, _raiser(AssertionError()), ["program", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:9] == [
        "Flags:",
        "  --width     How wide. (default: 3)",
        "  --[no]tall  Whether tall.",
        "",
        "Names:",
        "  --name      Its name.",
        "",
    ]


def _process(*argv, code="", **more):
    program = f"""
import sys
from tfdist.cli import command, flags
from tfdist.config.train_config import TrainConfig, VerifyConfig
def call(values):
    {code or "pass"}
code = command.run("train", flags.define, call)
assert "tensorflow" not in sys.modules
sys.exit(code)
"""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command_line = [sys.executable, "-c", program, *argv]
    return subprocess.Popen(command_line, env=buffered, stderr=subprocess.PIPE, text=True, **more)


@pytest.mark.parametrize(("argv", "code"), [(("--help",), ""), ((), "print('said', end='')")])
def test_a_reader_that_is_gone_is_no_error(argv, code):
    reader, writer = os.pipe()
    os.close(reader)
    with _process(*argv, code=code, stdout=writer) as process:
        os.close(writer)
        assert (process.communicate(timeout=300)[1], process.returncode) == ("", 0)
