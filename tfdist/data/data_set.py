"""A data set: examples for training and test, and what a model must know about them."""

import dataclasses

from tfdist.data.examples import Examples


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A data set.

    Attributes:
      name: name in the catalog, for display.
      train: training examples.
      test: test examples; None if there are none.
      input_shape: shape of one example's x, without a batch dim; () if x is a structure.
      classes: number of classes; None if y is not an integer label or the number is unknown.
      class_names: names of the classes, in the order of their numbers; empty if they have none.
    """

    name: str
    train: Examples
    test: Examples | None
    input_shape: tuple[int | None, ...]
    classes: int | None
    class_names: tuple[str, ...] = ()
