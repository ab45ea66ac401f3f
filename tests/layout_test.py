"""The plan as printed for users."""

import json
import pathlib
import re
import shlex
from collections.abc import Iterator

import keras
import pytest

from tests import documented_json
from tfdist import layout
from tfdist.cli import command, flags
from tfdist.config.train_config import LayoutConfig
from tfdist.errors.byte_sizes import byte_size

ROOT = pathlib.Path(__file__).parents[1]
MESHES = sorted(
    path for path in (ROOT / "examples" / "flagfiles").glob("*.flags") if "--strategy=mesh\n" in path.read_text()
)
LANGUAGE = ("--model=transformer(layers=1,width=16,heads=2)", "--dataset=text(length=16)", "--batch_size=8")


@pytest.fixture(autouse=True)
def float32_again() -> Iterator[None]:
    """The command sets Keras's global precision."""
    yield
    keras.config.set_dtype_policy("float32")


def printed(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    found = command.run(
        "layout",
        lambda values: flags.define(values, LayoutConfig),
        lambda values, output: layout.main(flags.config(values, LayoutConfig), output),
        ("layout", *argv),
        has_json=True,
    )
    output = capsys.readouterr()
    assert found == code, output.err
    return output.err if code else output.out


def test_what_the_document_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """Every line in docs/guides/meshes.md is printed, in the same order; three dots stand for omitted lines."""
    text = (ROOT / "docs" / "guides" / "meshes.md").read_text(encoding="utf-8")
    [(shown, lines)] = re.findall(r"```console\n\$ python -m tfdist\.layout (.*?[^\\])\n(.*?)```", text, re.DOTALL)
    found = printed(capsys, *shlex.split(shown.replace("\\\n", " ")))
    pattern = re.escape(lines).replace(re.escape("...\n"), r"(.*\n)*")
    assert re.fullmatch(pattern, found), found


@pytest.mark.parametrize("path", MESHES, ids=lambda path: path.stem)
def test_flag_files_lay_their_model_out(path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, f"--flagfile={path}")
    assert "Collectives of a step" in found and "Warning" not in found


def test_why_variables_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Replicated on each device: 22 variables, 46.9 KiB, no rule for" in printed(
        capsys, "--mesh_shape=data:2", *LANGUAGE
    )
    sharded = printed(capsys, "--mesh_shape=data:3", "--shard=optimizer", *LANGUAGE[:2], "--batch_size=9")
    assert "fewer than 1024 elements (--shard_min_elements) " in sharded
    assert "no dim that is divisible by the 3 devices of data " in sharded
    moving = ("--model=cnn(filters=(64,))", "--dataset=digits", "--batch_size=8", "--shard_min_elements=1")
    assert "2 variables, 512 bytes, not trainable " in printed(
        capsys, "--mesh_shape=data:2", "--shard=parameters", *moving
    )


def test_micro_steps_and_what_has_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "--mesh_shape=data:2;model:2", "--layout=hedas:model", "--accumulate_steps=4", *LANGUAGE)
    assert "Collectives of each of the 4 micro-steps of a step" in found
    assert "Warning: The rule hedas:model has no effect" in found and 'Did you mean "heads"' in found


def test_the_layout_that_is_found_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    first, _, rest = printed(
        capsys, "--mesh_shape=data:1;model:2", "--layout=auto", "--memory_gb=1", *LANGUAGE
    ).partition("\n")
    again = printed(capsys, "--mesh_shape=data:1;model:2", first, *LANGUAGE)
    assert again == rest
    assert "--memory_gb must be enough" in printed(
        capsys, "--mesh_shape=data:1;model:2", "--layout=auto", "--memory_gb=0.00001", *LANGUAGE, code=2
    )


def test_a_batch_that_the_mesh_does_not_divide(capsys: pytest.CaptureFixture[str]) -> None:
    error = printed(capsys, "--mesh_shape=data:4", *LANGUAGE[:2], "--batch_size=6", code=2)
    assert "--batch_size=6 and 4 replicas" in error


def test_json_says_what_the_text_says(capfd: pytest.CaptureFixture[str]) -> None:
    argv = ("--mesh_shape=data:2;model:2", "--layout=hedas:model", "--precision=mixed_bfloat16", *LANGUAGE)
    text = printed(capfd, *argv)
    record = json.loads(printed(capfd, "--json", *argv))
    documented_json.check("layout", record)
    rows = [line.split()[0] for line in text.splitlines()[2:] if "/" in line.split("  ")[0]]
    assert [one["path"] for one in record["variables"]] == rows[: len(record["variables"])]
    sizes = record["device_bytes"]
    assert f"parameters {byte_size(sizes['parameters'])}, gradients {byte_size(sizes['gradients'])}, " in text
    assert (
        f"optimizer state {byte_size(sizes['optimizer_state'])}, activations {byte_size(sizes['activations'])}" in text
    )
    assert sizes["parameters"] == sum(one["device_bytes"]["parameters"] for one in record["variables"])
    assert all(f"Warning: {line}\n" in text for line in record["warnings"]) and record["warnings"]
    assert all(f"{line}\n" in text for line in record["notes"]) and record["notes"]
    assert all(one["what"] in text and one["operation"] in text for one in record["collectives"])
    assert record["mesh"] == {"data": 2, "model": 2} and record["layout"]["hedas"] == "model"
