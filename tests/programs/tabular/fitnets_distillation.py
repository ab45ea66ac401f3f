"""Distillation of features and logits (FitNets): a subclassed model with trackers, and a student that continues training alone."""

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(6)


def make_teacher():
    inputs = keras.layers.Input((12,))
    x = keras.layers.Dense(48, activation="relu")(inputs)
    hint = keras.layers.Dense(32, activation="relu", name="hint")(x)
    logits = keras.layers.Dense(4, name="logits")(hint)
    return keras.Model(inputs, [logits, hint], name="teacher")


def make_student():
    inputs = keras.layers.Input((12,))
    guided = keras.layers.Dense(10, activation="relu", name="guided")(inputs)
    guided = keras.layers.BatchNormalization()(guided)
    logits = keras.layers.Dense(4, name="logits")(guided)
    return keras.Model(inputs, [logits, guided], name="student")


class FitNets(keras.Model):
    def __init__(self, teacher, student):
        super().__init__()
        self.teacher = teacher
        self.student = student
        self.regressor = keras.layers.Dense(32, use_bias=False, name="regressor")
        self.ce_tracker = keras.metrics.Mean(name="student_loss")
        self.kd_tracker = keras.metrics.Mean(name="distillation_loss")
        self.hint_tracker = keras.metrics.Mean(name="hint_loss")
        self.agreement_tracker = keras.metrics.Accuracy(name="agreement")
        self.accuracy_tracker = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    def compile(self, optimizer, alpha=0.4, beta=0.2, temperature=3.0, **kwargs):
        super().compile(optimizer=optimizer, **kwargs)
        self.alpha, self.beta, self.temperature = alpha, beta, temperature

    def call(self, x, training=False):
        return self.student(x, training=training)[0]

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        teacher_logits, hint = self.teacher(x, training=False)
        soft = tf.nn.softmax(teacher_logits / self.temperature)

        with tf.GradientTape() as tape:
            logits, guided = self.student(x, training=True)
            ce = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            kd = keras.losses.categorical_crossentropy(soft, logits / self.temperature, from_logits=True)
            kd = kd * self.temperature**2
            hints = tf.reduce_mean(tf.square(hint - self.regressor(guided)), axis=-1)
            loss = (1 - self.alpha) * tf.reduce_mean(ce) + self.alpha * tf.reduce_mean(kd)
            loss += self.beta * tf.reduce_mean(hints)
            loss += tf.add_n(self.student.losses) if self.student.losses else 0.0

        variables = self.student.trainable_variables + self.regressor.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

        self.ce_tracker.update_state(ce)
        self.kd_tracker.update_state(kd)
        self.hint_tracker.update_state(hints)
        self.agreement_tracker.update_state(tf.argmax(teacher_logits, axis=-1), tf.argmax(logits, axis=-1))
        self.accuracy_tracker.update_state(y, logits)
        results = {m.name: m.result() for m in self.metrics if m.name != "loss"}
        results["gap"] = results["distillation_loss"] - results["student_loss"]
        return results

    def test_step(self, data):
        x, y = data
        teacher_logits, _ = self.teacher(x, training=False)
        logits = self(x, training=False)
        self.ce_tracker.update_state(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))
        self.agreement_tracker.update_state(tf.argmax(teacher_logits, axis=-1), tf.argmax(logits, axis=-1))
        self.accuracy_tracker.update_state(y, logits)
        return {m.name: m.result() for m in (self.ce_tracker, self.agreement_tracker, self.accuracy_tracker)}


# Four classes, by the signs of two products
x = np.random.normal(size=(380, 12)).astype(np.float32)
y = 2 * (x[:, 0] * x[:, 1] > 0) + (x[:, 2] + 0.5 * x[:, 3] > 0)
x_train, y_train, x_test, y_test = x[:310], y[:310], x[310:], y[310:]

teacher = make_teacher()
teacher.compile(
    optimizer=keras.optimizers.Adam(0.01),
    loss=[keras.losses.SparseCategoricalCrossentropy(from_logits=True), None],
    metrics=[["accuracy"], None],
)
teacher_history = teacher.fit(x_train, y_train, batch_size=32, epochs=4, verbose=2)
teacher.trainable = False

student = make_student()
fitnets = FitNets(teacher, student)
fitnets.compile(optimizer=keras.optimizers.Adafactor(0.05))
distilled = fitnets.fit(
    x_train, y_train, batch_size=48, epochs=3, validation_data=(x_test, y_test), validation_batch_size=20, verbose=2
)

# The student alone, for one epoch more
alone = keras.Model(student.inputs, student.outputs[0])
alone.compile(
    optimizer=keras.optimizers.SGD(0.01),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
alone.fit(x_train, y_train, batch_size=48, epochs=1, verbose=2)

print("teacher:", teacher_history.history["loss"])
for name, values in distilled.history.items():
    print(name, [float(v) for v in values])
print("distilled:", fitnets.evaluate(x_test, y_test, verbose=0, return_dict=True))
print("alone:", alone.evaluate(x_test, y_test, batch_size=len(x_test), verbose=0, return_dict=True))
print("predicted:", np.bincount(alone.predict(x_test, verbose=0).argmax(axis=1), minlength=4))
