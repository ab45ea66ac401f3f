"""Saving, serializing and exporting models: complete models, configurations, clones, and weights only."""

import keras
import numpy as np
from keras import ops

keras.utils.set_random_seed(812)


def get_model():
    # Create a simple model.
    inputs = keras.Input(shape=(32,))
    outputs = keras.layers.Dense(1)(inputs)
    model = keras.Model(inputs, outputs)
    model.compile(optimizer=keras.optimizers.Adam(), loss="mean_squared_error")
    return model


model = get_model()

# Train the model.
test_input = np.random.random((128, 32))
test_target = np.random.random((128, 1))
model.fit(test_input, test_target)

# Calling `save('my_model.keras')` creates a zip archive `my_model.keras`.
model.save("my_model.keras")

# It can be used to reconstruct the model identically.
reconstructed_model = keras.models.load_model("my_model.keras")
np.testing.assert_allclose(model.predict(test_input), reconstructed_model.predict(test_input), rtol=1e-5)

# The optimizer's state was saved too, so training goes on where it stopped.
history = reconstructed_model.fit(test_input, test_target, epochs=2, batch_size=24)
print("continued:", history.history["loss"], "iterations:", int(reconstructed_model.optimizer.iterations))


# Custom objects
@keras.saving.register_keras_serializable(package="MyLayers")
class CustomLayer(keras.layers.Layer):
    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, x):
        return x * self.factor

    def get_config(self):
        return {**super().get_config(), "factor": self.factor}


@keras.saving.register_keras_serializable(package="my_package", name="custom_fn")
def custom_fn(x):
    return ops.square(x)


@keras.saving.register_keras_serializable(package="ComplexModels")
class CustomModel(keras.Model):
    def __init__(self, first_layer, second_layer=None, **kwargs):
        super().__init__(**kwargs)
        self.first_layer = first_layer
        self.second_layer = second_layer if second_layer is not None else keras.layers.Dense(8)
        self.head = keras.layers.Dense(1)

    def get_config(self):
        config = super().get_config()
        config.update({"first_layer": self.first_layer, "second_layer": self.second_layer})
        return config

    @classmethod
    def from_config(cls, config):
        config["first_layer"] = keras.layers.deserialize(config["first_layer"])
        config["second_layer"] = keras.layers.deserialize(config["second_layer"])
        return cls(**config)

    def call(self, inputs):
        return self.head(self.first_layer(self.second_layer(inputs)))


# A class that is not registered is named when the model is loaded.
class Doubled(keras.layers.Layer):
    def call(self, x):
        return 2 * x


inputs = keras.Input(shape=(32,))
x = CustomLayer(factor=0.5)(inputs)
outputs = keras.layers.Dense(1, activation=custom_fn)(x)
model = keras.Model(inputs, outputs)
model.compile(optimizer="adam", loss="mse")
model.fit(test_input, test_target, epochs=2)
model.save("custom_model.keras")
print(keras.models.load_model("custom_model.keras").evaluate(test_input, test_target, verbose=0))

subclassed = CustomModel(first_layer=CustomLayer(factor=2.0))
subclassed.compile(optimizer="sgd", loss="mse")
subclassed.fit(test_input, test_target, batch_size=48)
subclassed.save("subclassed.keras")
restored = keras.models.load_model("subclassed.keras")
print("subclassed:", subclassed.evaluate(test_input, test_target), restored.evaluate(test_input, test_target))

doubled = keras.Sequential([keras.Input(shape=(32,)), Doubled(), keras.layers.Dense(1)])
doubled.compile(optimizer="adam", loss="mse")
doubled.fit(test_input, test_target)
doubled.save("doubled.keras")
loaded = keras.models.load_model("doubled.keras", custom_objects={"Doubled": Doubled})
print("doubled:", loaded.fit(test_input, test_target).history)

# A configuration has no weights; a clone has new ones.
new_model = keras.Model.from_config(model.get_config())
print([layer.name for layer in new_model.layers], len(keras.models.model_from_json(model.to_json()).weights))
cloned = keras.models.clone_model(model)
cloned.set_weights(model.get_weights())
np.testing.assert_allclose(cloned.predict(test_input), model.predict(test_input), rtol=1e-5)

# Weights alone, from one model to another that shares its first layers
inputs = keras.Input(shape=(32,), name="digits")
x = keras.layers.Dense(16, activation="relu", name="dense_1")(inputs)
functional_model = keras.Model(inputs, keras.layers.Dense(1, name="predictions")(x), name="3_layer_mlp")
functional_model.compile(optimizer="adam", loss="mse")
functional_model.fit(test_input, test_target)
functional_model.save_weights("my.weights.h5")
pretrained = keras.Model(inputs, keras.layers.Dense(1, name="predictions")(x))
pretrained.load_weights("my.weights.h5")
extracted = keras.Sequential(pretrained.layers[:-1])
extracted.add(keras.layers.Dense(3, name="dense_3"))
transfer = keras.Sequential([keras.Input(shape=(32,)), extracted])
transfer.compile(optimizer="adam", loss="mse")
transfer_history = transfer.fit(test_input, np.random.random((128, 3)), epochs=2)
