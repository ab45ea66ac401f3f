"""Distributed training of a digit classifier on all local devices, with checkpoints and a decaying learning rate."""

import os

import numpy as np
import tensorflow as tf

import tfdist

tf.keras.utils.set_random_seed(812)

gpus = tf.config.list_logical_devices("GPU")
devices = gpus or tf.config.list_logical_devices("CPU")
strategy = tf.distribute.MirroredStrategy([device.name for device in devices])
print(f"Number of devices: {strategy.num_replicas_in_sync}")

num_train_examples, num_test_examples = 200, 60
BUFFER_SIZE = 10000

BATCH_SIZE_PER_REPLICA = 48 // strategy.num_replicas_in_sync
BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync

images = np.random.randint(0, 256, size=(num_train_examples + num_test_examples, 10, 10, 1)).astype("uint8")
labels = np.random.randint(0, 10, size=len(images))
mnist_train = tf.data.Dataset.from_tensor_slices((images[:num_train_examples], labels[:num_train_examples]))
mnist_test = tf.data.Dataset.from_tensor_slices((images[num_train_examples:], labels[num_train_examples:]))


def scale(image, label):
    image = tf.cast(image, tf.float32)
    image /= 255
    return image, label


train_dataset = mnist_train.map(scale).cache().shuffle(BUFFER_SIZE).batch(BATCH_SIZE)
eval_dataset = mnist_test.map(scale).batch(BATCH_SIZE)

# Prepare a directory to store all the checkpoints.
checkpoint_dir = "./training_checkpoints"
if not os.path.exists(checkpoint_dir):
    os.makedirs(checkpoint_dir)


def get_compiled_model():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(8, 3, activation="relu", input_shape=(10, 10, 1)),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(16, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.Adam(learning_rate=0.001),
        metrics=["accuracy"],
    )
    return model


def make_or_restore_model():
    # Either restore the latest model, or create a fresh one if there is no checkpoint available.
    checkpoints = [os.path.join(checkpoint_dir, name) for name in sorted(os.listdir(checkpoint_dir))]
    if checkpoints:
        latest_checkpoint = max(checkpoints, key=os.path.getctime)
        print("Restoring from", latest_checkpoint)
        return tf.keras.models.load_model(latest_checkpoint)
    print("Creating a new model")
    return get_compiled_model()


# Define a function for decaying the learning rate.
def decay(epoch):
    if epoch < 1:
        return 1e-3
    elif epoch < 2:
        return 1e-4
    else:
        return 1e-5


# Define a callback for printing the learning rate at the end of each epoch.
class PrintLR(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print(f"\nLearning rate for epoch {epoch + 1} is {self.model.optimizer.learning_rate.numpy()}")


callbacks = [
    tf.keras.callbacks.TensorBoard(log_dir="./logs"),
    tf.keras.callbacks.ModelCheckpoint(filepath=os.path.join(checkpoint_dir, "ckpt-{epoch}.keras"), save_freq="epoch"),
    tf.keras.callbacks.LearningRateScheduler(decay),
    PrintLR(),
]


def run_training(epochs=1, initial_epoch=0):
    # Everything that creates variables should be under the strategy scope.
    with strategy.scope():
        model = make_or_restore_model()
    model = tfdist.distribute(model)
    history = model.fit(train_dataset, epochs=epochs, initial_epoch=initial_epoch, callbacks=callbacks)
    print(history.history)
    return model


# Running the first time creates the model; calling the same function again resumes from where it left off.
run_training(epochs=2)
model = run_training(epochs=3, initial_epoch=2)

eval_loss, eval_acc = model.evaluate(eval_dataset)
print(f"Eval loss: {eval_loss}, Eval accuracy: {eval_acc}")

# Save the model, load it without the strategy's scope and with it
path = "my_model.keras"
model.save(path)

unreplicated_model = tf.keras.models.load_model(path)
eval_loss, eval_acc = unreplicated_model.evaluate(eval_dataset)
print(f"Eval loss: {eval_loss}, Eval Accuracy: {eval_acc}")

with strategy.scope():
    replicated_model = tf.keras.models.load_model(path)
replicated_model = tfdist.distribute(replicated_model)
eval_loss, eval_acc = replicated_model.evaluate(eval_dataset)
print(f"Eval loss: {eval_loss}, Eval Accuracy: {eval_acc}")
