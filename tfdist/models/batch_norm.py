"""The kind of batch normalization in a model: over each replica's own rows, or synchronized over all replicas."""

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

    All other layers are shared with the given model, which must not be trained in addition to the new one.

    Args:
      model: functional or sequential model, including nested and user-defined ones.
      batch_norm: "synchronized" replaces `keras.layers.BatchNormalization` by `tfdist.layers.SyncBatchNormalization`;
        "local" does the reverse, for a file that Keras can load without tfdist. Subclasses of either are left alone.

    Returns:
      The new model, or the given one if there is nothing to replace.

    Raises:
      InputError: the kind is unknown, or layers are where they cannot be replaced.
    """
    new = layer_class(batch_norm)
    (old,) = set(_LAYERS.values()) - {new}
    if not _layers(model, old):
        return model
    replaced: list[tuple[keras.Layer, keras.Layer]] = []

    def replace(layer: keras.Layer) -> keras.Layer:
        if type(layer) is not old:
            return layer
        replaced.append((layer, _converted(layer, new)))
        return replaced[-1][1]

    try:
        clone = keras.models.clone_model(model, clone_function=replace, recursive=True)
    except (TypeError, ValueError) as error:
        raise _replacement_error(model, old, new, " ".join(str(error).split())) from error
    if remaining := _layers(clone, old):
        raise _replacement_error(model, old, new, f"{remaining[0].path} belongs to a layer of your own")
    for before, after in replaced:
        if before.built and after.built:
            after.set_weights(before.get_weights())
    return clone


def _converted(layer: keras.Layer, new: type[keras.Layer]) -> keras.Layer:
    config = layer.get_config()
    if config.pop("renorm", False):
        raise InputError(f"Batch renormalization cannot be synchronized. Received: {layer.path}. Use renorm=False.")
    for name in ("synchronized", "renorm_clipping", "renorm_momentum"):
        config.pop(name, None)
    return new.from_config(config)


def _layers(model: keras.Model, kind: type[keras.Layer]) -> list[keras.Layer]:
    return [layer for layer in layers_of(model) if type(layer) is kind]


def _replacement_error(model: keras.Model, old: type, new: type, why: str) -> InputError:
    return InputError(
        f"Only the layers of functional and sequential models can be replaced. Received: {model.name}: {why}. Write "
        f"{new.__module__.partition('.')[0]}.layers.{new.__name__} for {old.__name__} in the model."
    )
