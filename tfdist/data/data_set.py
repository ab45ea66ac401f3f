"""What a name of the catalog stands for: the examples to train on and to test on, and what a model must know."""

import dataclasses

from tfdist.data.examples import Examples


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A data set.

    Attributes:
      name: for people, as in the catalog.
      train: the examples to train on.
      test: the examples to evaluate on; None if there are none.
      input_shape: shape of one example's x, without a batch dim; () if x is a structure.
      classes: how many classes the labels have; None if y is not an integer label or it is not known.
    """

    name: str
    train: Examples
    test: Examples | None
    input_shape: tuple[int | None, ...]
    classes: int | None
