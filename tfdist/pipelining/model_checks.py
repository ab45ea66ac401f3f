"""Checks of a model that is trained in stages, besides those of whether it can be cut."""

import keras

from tfdist import keras_internals
from tfdist.errors import InputError


def check_stages_of(model: keras.Model) -> None:
    """Raises `InputError` for a model whose stages could not be told apart, or whose layers would disagree."""
    paths = [variable.path for variable in model.variables]
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        raise InputError(
            "The variables of a pipeline must have unique paths, by which checkpoints know them. Received twice: "
            f"{twice[0]}. Give the layers of nested models, and variables of your own, different names."
        )
    metrics = keras_internals.metrics_of_layers(model)
    if metrics:
        raise InputError(
            "Layers of a pipeline must not have metrics, as each stage would have others. Received: "
            f"{metrics[0].path}. Pass the metric to `metrics=`."
        )


def refuse_training_without_trainer() -> None:
    """Makes Keras's own `fit` raise `InputError` for a model of a pipeline to which no trainer has given values."""
    keras_internals.refuse_training(
        "A model of a pipeline is trained by tfdist.Trainer, which gives each process the weights of its stages. Received: "
        "Keras's own fit or train_on_batch, and {path}, which has no value yet. Pass the model and what it is compiled with to "
        "tfdist.Trainer, and call the trainer's fit."
    )
