"""Batch normalization in a model: over the rows of each replica, or synchronized over all replicas."""

import keras

from tfdist.errors import InputError
from tfdist.errors.formatting import nearest
from tfdist.keras_internals import layers_of
from tfdist.layers import SyncBatchNormalization

_LAYERS: dict[str, type[keras.layers.BatchNormalization]] = {
    "local": keras.layers.BatchNormalization,
    "synchronized": SyncBatchNormalization,
}


def layer_class(batch_norm: str) -> type[keras.layers.BatchNormalization]:
    """Returns the layer class for "local" or "synchronized".

    Raises:
      InputError: the kind is unknown.
    """
    if batch_norm not in _LAYERS:
        raise InputError(f'Batch normalization "{batch_norm}" is not known.{nearest(str(batch_norm), _LAYERS)}')
    return _LAYERS[batch_norm]


def with_batch_norm(model: keras.Model, batch_norm: str) -> keras.Model:
    """Replaces the batch normalization layers of a model by another kind, with the same weights and names.

    All other layers are shared with the given model, so only one of the two models may be trained.

    Args:
      model: functional or sequential model, including nested and user-defined ones.
      batch_norm: "synchronized" replaces `keras.layers.BatchNormalization` by `tfdist.layers.SyncBatchNormalization`;
        "local" does the reverse, for a file that Keras can load without tfdist. Subclasses of either are left alone.

    Returns:
      The new model, or the given one if there is nothing to replace.

    Raises:
      InputError: the kind is unknown, or a layer cannot be replaced.
    """
    new_class = layer_class(batch_norm)
    (old_class,) = set(_LAYERS.values()) - {new_class}
    if not _layers_of_class(model, old_class):
        return model
    replacements: list[tuple[keras.Layer, keras.Layer]] = []

    def replace(layer: keras.Layer) -> keras.Layer:
        if type(layer) is not old_class:
            return layer
        replacements.append((layer, _convert(layer, new_class)))
        return replacements[-1][1]

    try:
        clone = keras.models.clone_model(model, clone_function=replace, recursive=True)
    except (TypeError, ValueError) as error:
        raise _replacement_error(model, old_class, new_class, " ".join(str(error).split())) from error
    if remaining := _layers_of_class(clone, old_class):
        raise _replacement_error(model, old_class, new_class, f"{remaining[0].path} belongs to a layer of your own")
    for old_layer, new_layer in replacements:
        if old_layer.built and new_layer.built:
            new_layer.set_weights(old_layer.get_weights())
    return clone


def _convert(layer: keras.Layer, new: type[keras.Layer]) -> keras.Layer:
    config = layer.get_config()
    if config.pop("renorm", False):
        raise InputError(f"Batch renormalization cannot be synchronized. Received: {layer.path}. Use renorm=False.")
    for name in ("synchronized", "renorm_clipping", "renorm_momentum"):
        config.pop(name, None)
    return new.from_config(config)


def _layers_of_class(model: keras.Model, layer_class: type[keras.Layer]) -> list[keras.Layer]:
    return [layer for layer in layers_of(model) if type(layer) is layer_class]


def _replacement_error(model: keras.Model, old: type, new: type, reason: str) -> InputError:
    return InputError(
        f"Only the layers of functional and sequential models can be replaced. Received: {model.name}: {reason}. Write "
        f"{new.__module__.partition('.')[0]}.layers.{new.__name__} for {old.__name__} in the model."
    )
