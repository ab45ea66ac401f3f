"""Data sets, the pipelines that distribute their rows to replicas, and the batch schedule.

The global batch is a pure function of the seed and the step, and does not depend on the number of replicas.
"""

from tfdist.data.adapters import as_data_set, as_examples, fit_data
from tfdist.data.augmentation import Augmentation, Augmented, RowRandom, augmented
from tfdist.data.catalog import load
from tfdist.data.class_weight import with_class_weight
from tfdist.data.data_set import DataSet
from tfdist.data.examples import Element, Examples, Transform
from tfdist.data.pipeline import EvaluationPipeline, Pipeline, check_batch_size
from tfdist.data.reading_errors import explained_reading
from tfdist.data.row_allocation import rows
from tfdist.data.row_partition import check_equal_shares
from tfdist.data.shuffle import steps_in_epochs
from tfdist.data.source import ArraySource, Source
from tfdist.data.stream import StreamSource
from tfdist.data.stream_position import StreamPosition
from tfdist.data.text import TextSource

__all__ = [
    "ArraySource",
    "Augmentation",
    "Augmented",
    "DataSet",
    "Element",
    "EvaluationPipeline",
    "Examples",
    "Pipeline",
    "RowRandom",
    "StreamPosition",
    "Source",
    "StreamSource",
    "TextSource",
    "Transform",
    "as_data_set",
    "as_examples",
    "augmented",
    "check_batch_size",
    "check_equal_shares",
    "explained_reading",
    "fit_data",
    "load",
    "rows",
    "steps_in_epochs",
    "with_class_weight",
]
