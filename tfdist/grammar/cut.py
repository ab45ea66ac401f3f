"""Parses `--cut`: where a model is cut into stages. Does not import TensorFlow."""

import dataclasses

from tfdist.errors import InputError
from tfdist.grammar.spec import call, nearest, parse

AUTO = "auto"
MEASURES = ("time", "parameters", "memory")


@dataclasses.dataclass(frozen=True)
class Balanced:
    """Stages of about equal cost.

    Attributes:
      by: "time" for the measured seconds of a forward and a backward pass, "parameters" for the bytes of the variables,
        "memory" for those and the activations.
    """

    by: str = "memory"

    def __post_init__(self) -> None:
        """Validates the measure."""
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
