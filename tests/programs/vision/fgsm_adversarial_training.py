"""Adversarial training: train_step perturbs the images by the fast gradient sign method."""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(31)

EPSILON = 0.1
NUM_CLASSES = 4


def load_data(n):
    """Noisy pictures with a bar in one of four places."""
    labels = np.random.randint(0, NUM_CLASSES, n)
    images = np.random.uniform(0, 0.5, (n, 8, 8, 1))
    for image, label in zip(images, labels):
        image[2 * label : 2 * label + 2] += 0.4
    return np.clip(images, 0, 1).astype("float32"), keras.utils.to_categorical(labels, NUM_CLASSES)


class AdversarialModel(keras.Model):
    """Half of the loss comes from the clean pictures, half from pictures that were changed to fool the network."""

    def __init__(self, *args, epsilon=EPSILON, adversarial_weight=0.5, **kwargs):
        super().__init__(*args, **kwargs)
        self.epsilon = epsilon
        self.adversarial_weight = adversarial_weight
        self.clean_loss_tracker = keras.metrics.Mean(name="clean_loss")
        self.adv_loss_tracker = keras.metrics.Mean(name="adv_loss")
        self.adv_accuracy = keras.metrics.CategoricalAccuracy(name="adv_accuracy")

    def perturb(self, x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = self.compute_loss(y=y, y_pred=self(x, training=False))
        gradient = tape.gradient(loss, x)
        return tf.stop_gradient(tf.clip_by_value(x + self.epsilon * tf.sign(gradient), 0.0, 1.0))

    def train_step(self, data):
        x, y = data
        x_adv = self.perturb(x, y)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            clean_loss = self.compute_loss(y=y, y_pred=y_pred)
            adv_pred = self(x_adv, training=True)
            adv_loss = self.compute_loss(y=y, y_pred=adv_pred)
            loss = (1 - self.adversarial_weight) * clean_loss + self.adversarial_weight * adv_loss
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))

        self.clean_loss_tracker.update_state(clean_loss)
        self.adv_loss_tracker.update_state(adv_loss)
        self.adv_accuracy.update_state(y, adv_pred)
        for metric in self.metrics:
            if metric.name == "compile_metrics":
                metric.update_state(y, y_pred)
        return {
            "clean_loss": self.clean_loss_tracker.result(),
            "adv_loss": self.adv_loss_tracker.result(),
            "adv_accuracy": self.adv_accuracy.result(),
        }

    def test_step(self, data):
        x, y = data
        x_adv = self.perturb(x, y)
        adv_pred = self(x_adv, training=False)
        self.clean_loss_tracker.update_state(self.compute_loss(y=y, y_pred=self(x, training=False)))
        self.adv_loss_tracker.update_state(self.compute_loss(y=y, y_pred=adv_pred))
        self.adv_accuracy.update_state(y, adv_pred)
        return {m.name: m.result() for m in (self.clean_loss_tracker, self.adv_loss_tracker, self.adv_accuracy)}


x_train, y_train = load_data(250)
x_test, y_test = load_data(90)

inputs = keras.Input((8, 8, 1))
x = layers.Conv2D(8, 3, activation="relu")(inputs)
x = layers.MaxPooling2D()(x)
x = layers.Flatten()(x)
x = layers.Dense(16, activation="relu")(x)
x = layers.Dropout(0.2)(x)
outputs = layers.Dense(NUM_CLASSES)(x)
model = AdversarialModel(inputs, outputs)

model.compile(
    optimizer=keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    loss=keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
    metrics=["accuracy"],
)
history = model.fit(x_train, y_train, batch_size=32, epochs=3, validation_data=(x_test, y_test), verbose=2)

# Attacks of several strengths on the trained network
for epsilon in (0.0, 0.05, 0.2):
    model.epsilon = epsilon
    attacked = model.perturb(tf.convert_to_tensor(x_test, dtype=keras.config.floatx()), y_test)
    predicted = model.predict(attacked, verbose=0)
    accuracy = np.mean(predicted.argmax(axis=1) == y_test.argmax(axis=1))
    print(f"Accuracy with epsilon {epsilon:.2f}: {accuracy:.3f}")
print({name: values[-1] for name, values in history.history.items()})
