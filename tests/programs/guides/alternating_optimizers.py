"""Domain-adversarial training: two optimizers take turns, by a counter in a tf.Variable."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(17)


class DomainAdversarial(keras.Model):
    def __init__(self, features=12, classes=3):
        super().__init__()
        self.extractor = keras.Sequential(
            [
                layers.Dense(24, activation="relu"),
                layers.LayerNormalization(),
                layers.Dense(features, activation="tanh"),
            ]
        )
        self.classifier = keras.Sequential([layers.Dense(classes)])
        self.discriminator = keras.Sequential([layers.Dense(12, activation="relu"), layers.Dense(1)])
        self.counter = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.class_loss_tracker = keras.metrics.Mean(name="class_loss")
        self.domain_loss_tracker = keras.metrics.Mean(name="domain_loss")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
        self.extractor.build((None, 8))
        self.classifier.build((None, features))
        self.discriminator.build((None, features))

    def compile(self, main_optimizer, domain_optimizer, domain_weight=0.1):
        super().compile(loss=None)
        self.main_optimizer = main_optimizer
        self.domain_optimizer = domain_optimizer
        self.domain_weight = domain_weight
        self.cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.bce = keras.losses.BinaryCrossentropy(from_logits=True)
        # Variables cannot be made inside of tf.cond.
        self.main_variables = self.extractor.trainable_variables + self.classifier.trainable_variables
        self.main_optimizer.build(self.main_variables)
        self.domain_optimizer.build(self.discriminator.trainable_variables)

    @property
    def metrics(self):
        return [self.class_loss_tracker, self.domain_loss_tracker, self.accuracy]

    def call(self, x, training=False):
        return self.classifier(self.extractor(x, training=training), training=training)

    def domain_logits(self, source, target, training):
        both = tf.concat([self.extractor(source, training=training), self.extractor(target, training=training)], axis=0)
        labels = tf.concat([tf.zeros((tf.shape(source)[0], 1)), tf.ones((tf.shape(target)[0], 1))], axis=0)
        return labels, self.discriminator(both, training=training)

    def discriminator_step(self, source, y, target):
        with tf.GradientTape() as tape:
            labels, logits = self.domain_logits(source, target, training=True)
            loss = self.bce(labels, logits)
        variables = self.discriminator.trainable_variables
        self.domain_optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        self.domain_loss_tracker.update_state(loss)
        return loss

    def main_step(self, source, y, target):
        with tf.GradientTape() as tape:
            logits = self(source, training=True)
            class_loss = self.cross_entropy(y, logits)
            labels, domain_logits = self.domain_logits(source, target, training=True)
            # The features should not tell from which domain they come.
            loss = class_loss + self.domain_weight * self.bce(1.0 - labels, domain_logits)
        self.main_optimizer.apply_gradients(zip(tape.gradient(loss, self.main_variables), self.main_variables))
        self.class_loss_tracker.update_state(class_loss)
        self.accuracy.update_state(y, logits)
        return loss

    def train_step(self, data):
        (source, target), y = data
        loss = tf.cond(
            tf.equal(self.counter % 2, 0),
            lambda: self.discriminator_step(source, y, target),
            lambda: self.main_step(source, y, target),
        )
        self.counter.assign_add(1)
        return {"step_loss": loss, **{m.name: m.result() for m in self.metrics}}

    def test_step(self, data):
        x, y = data
        logits = self(x, training=False)
        self.class_loss_tracker.update_state(self.cross_entropy(y, logits))
        self.accuracy.update_state(y, logits)
        return {m.name: m.result() for m in (self.class_loss_tracker, self.accuracy)}


def blobs(n, shift):
    labels = np.random.randint(0, 3, n)
    centres = np.array([[2, 0, 0, 1, 0, 0, 0, 0], [0, 2, 0, 0, 1, 0, 0, 0], [0, 0, 2, 0, 0, 1, 0, 0]])
    return (centres[labels] + np.random.normal(0, 0.8, (n, 8)) + shift).astype("float32"), labels


source_x, source_y = blobs(275, 0.0)
target_x, target_y = blobs(275, 0.7)

model = DomainAdversarial()
model.compile(main_optimizer=keras.optimizers.Adam(5e-3), domain_optimizer=keras.optimizers.SGD(0.05, momentum=0.5))

before = model.evaluate(target_x, target_y, verbose=0, return_dict=True)
model.fit((source_x, target_x), source_y, batch_size=25, epochs=4, verbose=2)
after = model.evaluate(target_x, target_y, batch_size=64, verbose=0, return_dict=True)

print("Counter:", int(model.counter), "steps of the optimizers:", int(model.main_optimizer.iterations), end=" ")
print(int(model.domain_optimizer.iterations))
print("Predicted:", np.bincount(model.predict(target_x, verbose=0).argmax(axis=-1), minlength=3))
