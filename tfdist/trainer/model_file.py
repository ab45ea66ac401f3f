"""Writes a trained model to a file in Keras's format."""

import keras

from tfdist import keras_internals
from tfdist.models import with_batch_norm
from tfdist.step.validation import synchronized_layers
from tfdist.storage import AnyPath, path_of, storage_of


def save_model(model: keras.Model, path: AnyPath) -> None:
    """Writes a model that Keras alone can load; the path never has an incomplete one. See `Trainer.save`."""
    with storage_of(path).staged(path_of(path)) as local, keras_internals.weights_in_file():
        _save(model, str(local))


def _save(model: keras.Model, path: str) -> None:
    if synchronized_layers(model):
        model = with_batch_norm(model, "local")  # compiled with an optimizer like that of the given model
    if "tfdist" in str(keras.saving.serialize_keras_object(getattr(model, "optimizer", None))):
        with keras_internals.not_compiled(model) as plain:
            plain.save(path)
    else:
        model.save(path)
