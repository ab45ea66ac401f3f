"""Datasets, the pipelines that distribute their rows to replicas, and the batch schedule.

The global batch is a pure function of the seed and the step, independent of the number of replicas: `source` defines the
order of the examples, `row_partition` the rows of each replica. `inputs` wraps the arguments of `Trainer.fit`.
"""

from tfdist.data.augmentations import Augmentation, AugmentedExamples, RowRandom, augmented
from tfdist.data.batches import EvaluationPipeline, Pipeline
from tfdist.data.catalog import TextSource, load
from tfdist.data.examples import DatasetSplits, Element, Examples, Transform, with_class_weight
from tfdist.data.inputs import as_dataset_splits, as_examples, fit_data
from tfdist.data.reading_errors import explain_reading_errors
from tfdist.data.row_partition import check_batch_size, row_range
from tfdist.data.source import ArraySource, Source, steps_in_epochs
from tfdist.data.stream import StreamPosition, StreamSource

__all__ = [
    "ArraySource",
    "Augmentation",
    "AugmentedExamples",
    "DatasetSplits",
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
    "as_dataset_splits",
    "as_examples",
    "augmented",
    "check_batch_size",
    "explain_reading_errors",
    "fit_data",
    "load",
    "row_range",
    "steps_in_epochs",
    "with_class_weight",
]
