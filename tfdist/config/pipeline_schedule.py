"""Parses `--pipeline_schedule` and `--cut`: the order in which stages compute, and the layers between them."""

import dataclasses
from typing import ClassVar

from tfdist.config.spec import call, parse, spec_of
from tfdist.errors import InputError
from tfdist.errors.formatting import is_integer, nearest

AUTO = "auto"
MEASURES = ("time", "parameters", "memory")
_CSV = "csv"


@dataclasses.dataclass(frozen=True)
class Balanced:
    """Stages of about equal cost.

    Attributes:
      by: "time" for the measured seconds of a forward and a backward pass, "parameters" for the bytes of the variables,
        "memory" for those and the activations.
    """

    by: str = "memory"

    def __post_init__(self) -> None:
        if self.by not in MEASURES:
            raise InputError(f"balanced: {self.by} is not a measure.{nearest(str(self.by), MEASURES)}")

    def __str__(self) -> str:
        """Returns a text that `parse_cut` converts to an equal value."""
        return f"balanced(by={self.by})"


@dataclasses.dataclass(frozen=True)
class AfterLayers:
    """Stages that end after given layers.

    Attributes:
      names: name of the last layer of each stage but the last.
    """

    names: tuple[str, ...]

    def __str__(self) -> str:
        """Returns a text that `parse_cut` converts to an equal value."""
        return ",".join(self.names)


def parse_cut(text: str) -> Balanced | AfterLayers:
    """Parses `auto`, `balanced(by=time)`, or names of layers, separated by commas.

    `auto` is `balanced(by=memory)`, which is the same in every run: nothing is measured.

    Raises:
      InputError: `text` is none of these, or repeats a name.
    """
    text = text.strip()
    if text == AUTO:
        return Balanced()
    if text.partition("(")[0].strip() == "balanced":
        return call(Balanced, parse(text, words=["by"]))
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or "(" in text:
        raise InputError(
            f"A cut must be auto, balanced(by=memory), or the names of layers after which stages end. Received: {text!r}. "
            "Write block_1_add,block_3_add for three stages."
        )
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise InputError(f"A cut must name different layers. Received: {repeated} twice, in {text!r}. Name each once.")
    return AfterLayers(names)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineSchedule:
    """A schedule by name; the fields of subclasses are the parameters in the flag.

    Attributes:
      name: name of the schedule in the flag.
    """

    name: ClassVar[str]

    def __str__(self) -> str:
        """Returns a text that `parse_pipeline_schedule` converts to an equal value."""
        return str(spec_of(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPipe(PipelineSchedule):
    """All forward passes, then all backward passes (Huang et al., arXiv:1811.06965)."""

    name: ClassVar[str] = "gpipe"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneFOneB(PipelineSchedule):
    """One forward pass, one backward pass (Harlap et al., arXiv:1806.03377; flushed: Narayanan et al., arXiv:2104.04473)."""

    name: ClassVar[str] = "1f1b"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interleaved(PipelineSchedule):
    """1F1B with several parts of the model in each process (Narayanan et al., arXiv:2104.04473).

    Attributes:
      chunks: number of parts in each process, at least 2.
    """

    name: ClassVar[str] = "interleaved"

    chunks: int = 2

    def __post_init__(self) -> None:
        if not is_integer(self.chunks) or self.chunks < 2:
            raise InputError(
                "interleaved: chunks must be a number of parts of the model in each process, at least 2. "
                f"Received: {self.chunks!r}. With one part, write {OneFOneB.name}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZBH1(PipelineSchedule):
    """Zero-bubble H1: gradients of weights fill the bubble of 1F1B (Qi et al., arXiv:2401.10241)."""

    name: ClassVar[str] = "zb_h1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipeDream(PipelineSchedule):
    """1F1B without a flush; gradients are those of older weights (Narayanan et al., SOSP 2019).

    Attributes:
      vertical_sync: whether all stages compute a batch with weights of the same age.
    """

    name: ClassVar[str] = "pipedream"

    vertical_sync: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.vertical_sync, bool):
            raise InputError(
                "pipedream: vertical_sync must be True, for weights of the same age in all stages, or False. "
                f"Received: {self.vertical_sync!r}. Write pipedream(vertical_sync=True)."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoBW(PipelineSchedule):
    """1F1B without a flush; gradients are those of the weights one update ago (Narayanan et al., arXiv:2006.09503)."""

    name: ClassVar[str] = "2bw"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FromCSV(PipelineSchedule):
    """A schedule from a file in the format of torch.distributed.pipelining: a line for each process.

    Attributes:
      file: path of the file.
    """

    name: ClassVar[str] = _CSV

    file: str

    def __str__(self) -> str:
        return f"{self.name}:{self.file}"


NAMED: dict[str, type[PipelineSchedule]] = {
    kind.name: kind for kind in (GPipe, OneFOneB, Interleaved, ZBH1, PipeDream, TwoBW)
}
WITHOUT_FLUSH = (PipeDream, TwoBW)
_KNOWN = (*NAMED, f"{_CSV}:FILE")


def parse_pipeline_schedule(text: str) -> PipelineSchedule:
    """Parses the value of `--pipeline_schedule`, such as `1f1b`, `interleaved(chunks=2)` or `csv:schedule.csv`.

    Raises:
      InputError: the name or a parameter is unknown or out of range.
    """
    name, colon, file = text.strip().partition(":")
    if name == _CSV:
        if not colon or not file.strip():
            raise InputError(f"{text} must name a file. Write {_CSV}:schedule.csv")
        return FromCSV(file=file.strip())
    spec = parse(text)
    if spec.name not in NAMED:
        raise InputError(f"{spec.name} is not a known pipeline schedule.{nearest(spec.name, _KNOWN)}")
    schedule: PipelineSchedule = call(NAMED[spec.name], spec)
    return schedule
