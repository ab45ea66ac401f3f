"""The plan as printed for users."""

import json
import pathlib
import re
import shlex
from typing import Any

import pytest

from tests import documented_json
from tfdist import layout
from tfdist.cli import command
from tfdist.config.layout_config import LayoutConfig
from tfdist.errors import byte_size

ROOT = pathlib.Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("precision")  # which the command sets
MESHES = sorted(
    path for path in (ROOT / "examples" / "flagfiles").glob("*.flags") if "--strategy=mesh\n" in path.read_text()
)
LANGUAGE = ("--model=transformer(layers=1,width=16,heads=2)", "--dataset=text(length=16)", "--batch_size=8")


def printed(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    found = command.run("layout", LayoutConfig, layout.main, ("layout", *argv), has_json=True)
    output = capsys.readouterr()
    assert found == code, output.err
    return output.err if code else output.out


def in_json(capfd: pytest.CaptureFixture[str], *argv: str, flags: str = "--strategy=pipeline ") -> dict[str, Any]:
    """Returns what is printed with --json; all of its keys are documented, after the title with these flags."""
    record = json.loads(printed(capfd, "--json", *argv))
    documented_json.check("layout", record, flags)
    return record


@pytest.mark.smoke("layout")
@pytest.mark.parametrize("guide", ["meshes", "pipelines"])
def test_what_a_document_shows(guide: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every line is printed, in the same order; three dots stand for omitted lines."""
    text = (ROOT / "docs" / "guides" / f"{guide}.md").read_text(encoding="utf-8")
    [(shown, lines)] = re.findall(r"```console\n\$ tfdist layout (.*?[^\\])\n(.*?)```", text, re.DOTALL)
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


def test_json_says_what_the_text_says(capfd: pytest.CaptureFixture[str]) -> None:
    argv = ("--mesh_shape=data:2;model:2", "--layout=hedas:model", "--precision=mixed_bfloat16", *LANGUAGE)
    text = printed(capfd, *argv)
    record = in_json(capfd, *argv, flags="")
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


PIPELINE = ("--mesh_shape=stage:2;data:2", "--micro_batches=2", *LANGUAGE[:2], "--batch_size=16")


def test_the_stages_of_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, *PIPELINE)
    assert "2 stages in 2 processes, 2 replicas, each step 2 micro-batches of 4 examples per replica" in found
    assert "(4x16x16 float32)" in found and "summed over the 2 replicas" in found
    assert re.search(r"^1f1b +3\d\.\d% +2 1 +\S+ KiB, \S+ KiB +8.0 KiB, 8.0 KiB$", found, re.MULTILINE), found
    assert re.search(r"^gpipe +3\d\.\d% +2 2 ", found, re.MULTILINE)
    assert re.search(r"^interleaved\(chunks=2\) ", found, re.MULTILINE)
    assert re.search(r"^zb_h1 ", found, re.MULTILINE)
    again = printed(capsys, *PIPELINE, "--strategy=pipeline", "--cut=auto", "--pipeline_schedule=1f1b")
    assert again == found


def test_the_requested_schedule_decides_the_stages(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, *PIPELINE, "--pipeline_schedule=interleaved(chunks=3)")
    assert "6 stages in 2 processes" in found and "To stage 5: " in found
    assert "interleaved(chunks=3)" in found and "1f1b" in found
    odd = printed(capsys, "--mesh_shape=stage:2", "--micro_batches=1", *LANGUAGE)
    assert "Not possible: interleaved(chunks=2). The interleaved schedule needs" in odd


def test_json_of_a_pipeline(capfd: pytest.CaptureFixture[str]) -> None:
    text = printed(capfd, *PIPELINE)
    record = in_json(capfd, *PIPELINE)
    first, last = record["stages"]
    assert last["sent"] == [] and last["forward_seconds"] is None and first["sent_bytes"] == 4 * 16 * 16 * 4
    assert f"{first['last_layer']} (4x16x16 float32)" in text and f"{first['parameters']:,}" in text
    schedules = {each["schedule"]: each for each in record["schedules"]}
    for stage, held in zip(record["stages"], schedules["1f1b"]["process_bytes"], strict=True):
        live = 2 if stage is first else 1
        state = sum(stage["bytes"][kind] for kind in ("variables", "gradients", "optimizer_state"))
        assert held == state + live * stage["bytes"]["activations"]
        assert stage["bytes"]["optimizer_state"] == 2 * stage["bytes"]["gradients"], "AdamW has two slots"
    assert schedules["1f1b"]["message_bytes"] == [2 * first["sent_bytes"]] * 2, "activations, and their gradients"
    assert all(f"{note}\n" in text for note in record["notes"])


def test_older_weights_of_a_schedule_without_a_flush(capfd: pytest.CaptureFixture[str]) -> None:
    """One version in the first of two stages."""
    flags = (*PIPELINE, "--pipeline_schedule=pipedream")
    record = in_json(capfd, *flags)
    first, _ = (stage["bytes"]["gradients"] for stage in record["stages"])
    schedules = {each["schedule"]: each for each in record["schedules"]}
    found, flushed = schedules["pipedream"], schedules["1f1b"]
    assert found["older_weights_bytes"] == [first, 0] and flushed["older_weights_bytes"] == [0, 0]
    assert [a - b for a, b in zip(found["process_bytes"], flushed["process_bytes"], strict=True)] == [first, 0]
    note = f"The memory of pipedream includes {byte_size(first)}, 0 bytes for older versions of the weights"
    assert note in printed(capfd, *flags)


def test_messages_of_a_step(capfd: pytest.CaptureFixture[str]) -> None:
    large = (*PIPELINE[1:4], "--mesh_shape=stage:2", "--batch_size=64", "--activation_compression=int8")
    record = in_json(capfd, *large, "--pipeline_schedule=interleaved(chunks=2)")
    code = 32 * 16 * 16 + 4 * 32 + 4
    assert record["activation_compression"] == "int8"
    assert [stage["sent_bytes"] for stage in record["stages"]] == [code, code, code, 0]
    found = {each["schedule"]: each["message_bytes"] for each in record["schedules"]}
    assert found["1f1b"] == [2 * code, 2 * code]
    assert found["interleaved(chunks=2)"] == [2 * 3 * code, 2 * 3 * code]


def test_stages_on_several_devices(capfd: pytest.CaptureFixture[str]) -> None:
    spread = ("--mesh_shape=stage:2;data:2;model:2", "--layout=heads:model;ffn:model;hedas:model", *PIPELINE[1:])
    text = printed(capfd, *spread)
    assert "2 stages in 2 processes with 2 devices each, 2 replicas" in text
    assert re.search(r"^block_0_ffn_in/kernel +embed ffn +16x64 +\*,model +2.0 KiB$", text, re.MULTILINE), text
    assert "Warning: The rule hedas:model has no effect" in text and 'Did you mean "heads"' in text
    found, whole = (in_json(capfd, *flags) for flags in (spread, PIPELINE))
    assert found["mesh"] == {"stage": 2, "data": 2, "model": 2} and whole["mesh"]["model"] == 1
    assert found["layout"] == {"heads": "model", "ffn": "model", "hedas": "model"}
    saved = sum(v["bytes"] - v["device_bytes"] for v in found["sharded_variables"])
    for kind, times in (("variables", 1), ("gradients", 1), ("optimizer_state", 2)):
        sizes = [sum(stage["bytes"][kind] for stage in record["stages"]) for record in (found, whole)]
        assert sizes[0] == sizes[1] - times * saved, kind
    assert {each["operation"] for each in found["collectives"]} == {"all-reduce"} and not whole["collectives"]
    [summed] = {note for note in found["notes"] if "are summed over the 2 replicas" in note}
    assert summed in whole["notes"], "whole gradients are reduced"


def test_measured_stages(capfd: pytest.CaptureFixture[str]) -> None:
    record = in_json(capfd, "--measure_stages", *PIPELINE)
    times = [(stage["forward_seconds"], stage["backward_seconds"]) for stage in record["stages"]]
    assert all(forward + backward > 0 for forward, backward in times)
    schedules = {each["schedule"]: each for each in record["schedules"]}
    one = [forward + backward for forward, backward in times]
    assert schedules["1f1b"]["step_seconds"] == pytest.approx(sum(one) + max(one), rel=0.5)


def test_a_sharded_optimizer_of_stages(capfd: pytest.CaptureFixture[str]) -> None:
    argv = (*PIPELINE, "--shard=optimizer")
    text = printed(capfd, *argv)
    record, whole = in_json(capfd, *argv), in_json(capfd, *PIPELINE)
    assert record["shard"] == "optimizer" and whole["shard"] == "none"
    assert whole["optimizer_state_bytes"] == [[stage["bytes"]["optimizer_state"]] for stage in whole["stages"]]
    for number, parts in enumerate(record["optimizer_state_bytes"]):
        [state] = whole["optimizer_state_bytes"][number]
        assert len(parts) == 2 and sum(parts) == state and max(parts) < state
        shown = f"Optimizer state of stage {number}, sharded over 2 replicas: {' + '.join(map(byte_size, parts))}"
        assert shown in text
        before, after = (found["schedules"][0]["process_bytes"][number] for found in (whole, record))
        assert before - after == state - max(parts)
    assert "Updated weights of each stage" in text


@pytest.mark.parametrize("strategy", ["horovod", "multiworker"])
def test_a_sharded_optimizer_of_replicas(strategy: str, capfd: pytest.CaptureFixture[str]) -> None:
    argv = (f"--strategy={strategy}", "--processes=3", "--shard=optimizer", *LANGUAGE)
    text = printed(capfd, *argv)
    record = in_json(capfd, *argv, flags="--strategy=horovod ")
    parts, sizes = record["optimizer_state_bytes"], record["process_bytes"]
    assert f"{strategy} in 3 processes, at most 3 examples on each" in text
    assert f"Optimizer state, sharded over 3 replicas: {' + '.join(map(byte_size, parts))}" in text
    assert len(parts) == 3 and sum(parts) == 2 * sizes["gradients"], "AdamW has two slots"
    assert f"gradients {byte_size(sizes['gradients'])}, optimizer state at most {byte_size(max(parts))}, " in text
    whole = in_json(capfd, *(each for each in argv if each != "--shard=optimizer"), flags="--strategy=horovod ")
    assert whole["optimizer_state_bytes"] == [sum(parts)] * 3


def test_a_variable_that_outweighs_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--strategy=horovod", "--processes=4", "--shard=optimizer", "--model=mlp(hidden=(512,))")
    assert "; the largest is 3.4 times the mean, because variables are not divided" in printed(capsys, *argv)


def test_variables_of_parameter_servers(capfd: pytest.CaptureFixture[str]) -> None:
    argv = ("--strategy=parameter_server", "--processes=3", "--servers=2", "--model=cnn", "--dataset=digits")
    record = in_json(capfd, *argv, "--staleness=async", flags="--strategy=parameter_server ")
    text = printed(capfd, *argv, "--staleness=async")
    sizes = [server["variable_bytes"] for server in record["servers"]]
    assert sizes == [sum(v["bytes"] for v in record["variables"] if v["server"] == number) for number in range(2)]
    assert "3 workers and 2 servers, at most 64 examples of a step per worker" in text
    for number, server in enumerate(record["servers"]):
        state = byte_size(server["optimizer_state_bytes"])
        assert f"On server {number}: variables {byte_size(sizes[number])}, optimizer state {state}" in text
    assert {v["path"] for v in record["variables"]} >= {"norm_0/moving_mean", "conv_1/kernel"}
    in_turn = in_json(capfd, *argv, "--shard_variables=round_robin", flags="--strategy=parameter_server ")["variables"]
    assert (
        [v["server"] for v in in_turn]
        == [i % 2 for i in range(len(in_turn))]
        != [v["server"] for v in record["variables"]]
    )
    synchronous = in_json(capfd, *argv, flags="--strategy=parameter_server ")
    assert synchronous["step_examples"] == 22 and len(synchronous["variables"]) == len(record["variables"]) - 4


def test_tables_of_parameter_servers_are_on_all_of_them(capfd: pytest.CaptureFixture[str]) -> None:
    argv = ("--strategy=parameter_server", "--processes=1", "--servers=3", "--min_table_bytes=4096", *LANGUAGE)
    record = in_json(capfd, *argv, flags="--strategy=parameter_server ")
    sizes, variables = [server["variable_bytes"] for server in record["servers"]], record["variables"]
    [table] = [v for v in variables if v["server"] is None]
    assert table["shape"] == [256, 16] and sum(sizes) == sum(v["bytes"] for v in variables)
    assert sizes[2] - sum(v["bytes"] for v in variables if v["server"] == 2) == 85 * 16 * 4
    assert "by rows" in printed(capfd, *argv)
