"""`--config`, a YAML file with flags."""

import pathlib
import re
from collections.abc import Callable

import pytest

from tfdist.cli import command, flags
from tfdist.config.train_config import TrainConfig

ALL = """\
# The run of the report.
model: mlp(hidden=(64,))
batch_size: 128
learning_rate: 1e-3  # text for YAML 1.1
jit_compile: yes
checkpoint_async: false
checkpoint_every: 600s
profile_steps: 10:20  # 620 for YAML 1.1
metrics: [accuracy, top_k]
compression: {"path=.*bias": none, "size>=100": "topk(ratio=0.01)|fp16"}
strategy: "mirrored"
devices: 2
warmup_start: 0
"""


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Returns the one line by which the training command refuses its flags, with exit code 2."""

    def said(*argv: str) -> str:
        code = command.run("train", flags.define, lambda values: flags.config(values) and None, ["program", *argv])
        captured = capsys.readouterr()
        assert (code, captured.out, captured.err.count("\n")) == (2, "", 1), captured
        return captured.err

    return said


@pytest.fixture
def write(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a file in the current directory."""
    monkeypatch.chdir(tmp_path)
    return lambda text, name="run.yaml": (tmp_path / name).write_text(text, encoding="utf-8")


def parsed(*argv: str) -> TrainConfig:
    found: list[TrainConfig] = []
    code = command.run("train", flags.define, lambda values: found.append(flags.config(values)), ["program", *argv])
    assert code == 0
    return found[0]


def test_values_are_taken_as_they_are_written(write):
    write(ALL)
    assert parsed("--config=run.yaml") == TrainConfig(
        model="mlp(hidden=(64,))",
        batch_size=128,
        learning_rate=0.001,
        jit_compile=True,
        checkpoint_async=False,
        checkpoint_every="600s",
        profile_steps="10:20",
        metrics="accuracy,top_k",
        compression="path=.*bias: none; size>=100: topk(ratio=0.01)|fp16",
        strategy="mirrored",
        devices=2,
    )


def test_the_command_line_and_flag_files_win_wherever_they_stand(write):
    write("batch_size: 8\nepochs: 3\nseed: 5\n")
    write("--seed=6\n", "flags.txt")
    for argv in (("--config=run.yaml", "--batch_size=16"), ("--batch_size=16", "--config=run.yaml")):
        found = parsed(*argv, "--flagfile=flags.txt")
        assert (found.batch_size, found.epochs, found.seed) == (16, 3, 6)


@pytest.mark.parametrize("text", ["# nothing yet\n", "model:\ndata_dir: null\n"])
def test_what_is_left_out_sets_nothing(write, text: str):
    write(text)
    assert parsed("--config=run.yaml") == TrainConfig()


def test_of_several_files_the_last_one_wins(write):
    write("batch_size: 8\nepochs: 3\n")
    write("batch_size: 16\n", "more.yaml")
    found = parsed("--config=run.yaml", "--config=more.yaml")
    assert (found.batch_size, found.epochs) == (16, 3)


def test_the_file_of_the_documentation(write):
    text = (pathlib.Path(__file__).parents[2] / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    write(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[0])
    found = parsed("--config=run.yaml", "--epochs=2")
    assert (found.mesh_shape, found.layout, found.learning_rate) == ("data:2;model:2", "out:model", 0.01)
    assert (found.epochs, found.metrics, found.model) == (2, "accuracy", "mlp(hidden=(64,))")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 0.1\n", "run.yaml: lr is not a flag of tfdist train. Use --learning_rate=0.1."),
        ("batch-size: 3\n", "Use --batch_size=3."),
        ("help: true\n", "run.yaml: help is not a flag of tfdist train."),
        ("config: other.yaml\n", "run.yaml: config is not a flag of tfdist train."),
        ("flagfile: flags.txt\n", "run.yaml: flagfile is not a flag of tfdist train."),
        ("batch_size: [3, 4]\n", "run.yaml: --batch_size must be an integer. Received: 3,4."),
        ("seed: " + "[" * 20_000, "--config must name a YAML file. Received: run.yaml ("),
        ("seed: 1\n\tmodel: mlp\n", "--config must name a YAML file. Received: run.yaml ("),
        ("[1, 2]: 3\n", "--config must name a YAML file. Received: run.yaml ("),
    ],
)
def test_errors_name_the_file(write, refusal, text: str, message: str):
    """Others are in tests/cli/wrong_uses.tsv."""
    write(text)
    assert message in refusal("--config=run.yaml")


def test_what_cannot_be_read(refusal, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "--config must name a YAML file. Received: binary (" in refusal("--config=binary")
    (tmp_path / "flags.txt").write_bytes(b"--model=\xff\xfe\n")
    assert "can't decode byte" in refusal("--flagfile=flags.txt")
