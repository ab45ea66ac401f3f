"""A convnet with two heads that predict what is in an image and where."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(812)

IMAGE_SIZE = 16
NUM_CLASSES = 3
BATCH_SIZE = 32
EPOCHS = 3
AUTOTUNE = tf.data.AUTOTUNE


def make_images(num_images):
    """Draw one rectangle in each image; the class is the colour channel it is drawn in."""
    images = np.random.randint(0, 60, size=(num_images, IMAGE_SIZE, IMAGE_SIZE, 3))
    classes = np.random.randint(0, NUM_CLASSES, size=num_images)
    boxes = np.zeros((num_images, 4))
    for i in range(num_images):
        h, w = np.random.randint(4, 9, size=2)
        top, left = np.random.randint(0, IMAGE_SIZE - h), np.random.randint(0, IMAGE_SIZE - w)
        images[i, top : top + h, left : left + w, classes[i]] += 180
        boxes[i] = [left, top, left + w, top + h]
    return images.astype("uint8"), classes, (boxes / IMAGE_SIZE).astype("float32")


def format_example(image, class_id, box):
    image = tf.cast(image, tf.float32) / 255.0
    return image, {"class_output": class_id, "box_output": box}


def get_dataset(arrays, training):
    dataset = tf.data.Dataset.from_tensor_slices(arrays)
    if training:
        dataset = dataset.shuffle(200)
    return dataset.map(format_example, num_parallel_calls=AUTOTUNE).batch(BATCH_SIZE).prefetch(AUTOTUNE)


def build_model():
    inputs = keras.Input(shape=(IMAGE_SIZE, IMAGE_SIZE, 3), name="image")
    x = inputs
    for filters in [8, 12, 16]:
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D(2)(x)
    x = layers.Flatten()(x)
    x = layers.Dense(16, activation="relu")(x)
    class_output = layers.Dense(NUM_CLASSES, activation="softmax", name="class_output")(x)
    box_output = layers.Dense(4, name="box_output")(x)
    return keras.Model(inputs=inputs, outputs={"class_output": class_output, "box_output": box_output})


class IntersectionOverUnion(keras.metrics.Metric):
    def __init__(self, name="iou", **kwargs):
        super().__init__(name=name, **kwargs)
        self.iou = self.add_weight(name="iou", initializer="zeros")
        self.num_examples = self.add_weight(name="num_examples", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_true = tf.cast(y_true, self.dtype)
        y_pred = tf.cast(y_pred, self.dtype)
        low = tf.maximum(y_true[:, :2], y_pred[:, :2])
        high = tf.minimum(y_true[:, 2:], y_pred[:, 2:])
        intersection = tf.reduce_prod(tf.maximum(high - low, 0), axis=-1)
        area_true = tf.reduce_prod(y_true[:, 2:] - y_true[:, :2], axis=-1)
        area_pred = tf.reduce_prod(tf.maximum(y_pred[:, 2:] - y_pred[:, :2], 0), axis=-1)
        iou = intersection / (area_true + area_pred - intersection)
        self.iou.assign_add(tf.reduce_sum(iou))
        self.num_examples.assign_add(tf.cast(tf.shape(iou)[0], self.dtype))

    def result(self):
        return self.iou / self.num_examples

    def reset_state(self):
        self.iou.assign(0.0)
        self.num_examples.assign(0.0)


train_ds = get_dataset(make_images(200), training=True)
val_ds = get_dataset(make_images(50), training=False)

model = build_model()
model.summary()
model.compile(
    optimizer=keras.optimizers.Adam(1e-3),
    loss={"class_output": "sparse_categorical_crossentropy", "box_output": "mse"},
    loss_weights={"class_output": 1.0, "box_output": 2.0},
    metrics={"class_output": ["accuracy"], "box_output": [IntersectionOverUnion(), "mae"]},
)
history = model.fit(train_ds, epochs=EPOCHS, validation_data=val_ds)

results = model.evaluate(val_ds, return_dict=True)
for name, value in results.items():
    print(f"{name}: {value:.6f}")

predictions = model.predict(val_ds)
print("First predicted box:", predictions["box_output"][0])
