"""Basic classification of images of clothing."""

# TensorFlow and tf.keras
# Helper libraries
import numpy as np
import tensorflow as tf

tf.keras.utils.set_random_seed(812)

print(tf.__version__)

class_names = [
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
]

# Small images, of which each class has its own pattern
patterns = np.random.uniform(0, 255, size=(10, 14, 14))


def make_images(count):
    labels = np.random.randint(0, 10, size=count).astype("uint8")
    images = 0.7 * patterns[labels] + 0.3 * np.random.uniform(0, 255, size=(count, 14, 14))
    return images.astype("uint8"), labels


(train_images, train_labels), (test_images, test_labels) = make_images(250), make_images(60)
print(train_images.shape, len(train_labels), train_labels)

train_images = train_images / 255.0
test_images = test_images / 255.0

# Build the model
model = tf.keras.Sequential(
    [
        tf.keras.layers.Flatten(input_shape=(14, 14)),
        tf.keras.layers.Dense(16, activation="relu"),
        tf.keras.layers.Dense(10),
    ]
)

model.compile(
    optimizer="adam",
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)

# Train the model
history = model.fit(train_images, train_labels, epochs=3)
print(history.history)

# Evaluate accuracy
test_loss, test_acc = model.evaluate(test_images, test_labels, verbose=2)
print("\nTest accuracy:", test_acc)

# Make predictions
probability_model = tf.keras.Sequential([model, tf.keras.layers.Softmax()])
predictions = probability_model.predict(test_images)
print(predictions[0])
print("Predicted:", class_names[np.argmax(predictions[0])], "true:", class_names[test_labels[0]])

# Grab an image from the test dataset, and add it to a batch where it's the only member.
img = test_images[1]
img = np.expand_dims(img, 0)
print(img.shape)

predictions_single = probability_model.predict(img)
print(predictions_single, class_names[np.argmax(predictions_single[0])])
