"""Multi-worker training of a convnet, with checkpoints, backups and saving by the chief."""

import json
import os

import numpy as np
import tensorflow as tf

import tfdist

# The cluster, as each worker's environment describes it
tf_config = json.loads(os.environ.get("TF_CONFIG", "{}"))
num_workers = len(tf_config["cluster"]["worker"]) if tf_config else 1

strategy = tf.distribute.MultiWorkerMirroredStrategy()

tf.keras.utils.set_random_seed(812)


def mnist_dataset(batch_size):
    rng = np.random.default_rng(0)
    x_train = rng.integers(0, 256, size=(200, 10, 10))
    y_train = rng.integers(0, 10, size=(200,)).astype(np.int64)
    # The `x` arrays are in uint8 and have values in the [0, 255] range.
    # You need to convert them to float32 with values in the [0, 1] range.
    x_train = x_train / np.float32(255)
    train_dataset = (
        tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(200, seed=1).repeat().batch(batch_size)
    )
    return train_dataset


def build_and_compile_cnn_model():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.InputLayer(shape=(10, 10)),
            tf.keras.layers.Reshape(target_shape=(10, 10, 1)),
            tf.keras.layers.Conv2D(8, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(16, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.SGD(learning_rate=0.01),
        metrics=["accuracy"],
    )
    return model


per_worker_batch_size = 48 // num_workers
global_batch_size = per_worker_batch_size * num_workers
multi_worker_dataset = mnist_dataset(global_batch_size)

with strategy.scope():
    # Model building/compiling need to be within `strategy.scope()`.
    multi_worker_model = build_and_compile_cnn_model()
multi_worker_model = tfdist.distribute(multi_worker_model)

callbacks = [
    tf.keras.callbacks.ModelCheckpoint(os.path.join("checkpoints", "ckpt-{epoch}.keras")),
    tf.keras.callbacks.BackupAndRestore(backup_dir="backup"),
]
history = multi_worker_model.fit(multi_worker_dataset, epochs=3, steps_per_epoch=4, callbacks=callbacks)
print(history.history)

model_path = os.path.join("saved", "keras-model.keras")
os.makedirs("saved", exist_ok=True)


def _is_chief(task_type, task_id, cluster_spec):
    return (
        task_type is None
        or task_type == "chief"
        or (task_type == "worker" and task_id == 0 and "chief" not in cluster_spec.as_dict())
    )


def _get_temp_dir(dirpath, task_id):
    base_dirpath = "workertemp_" + str(task_id)
    temp_dir = os.path.join(dirpath, base_dirpath)
    tf.io.gfile.makedirs(temp_dir)
    return temp_dir


def write_filepath(filepath, task_type, task_id, cluster_spec):
    dirpath = os.path.dirname(filepath)
    base = os.path.basename(filepath)
    if not _is_chief(task_type, task_id, cluster_spec):
        dirpath = _get_temp_dir(dirpath, task_id)
    return os.path.join(dirpath, base)


task_type, task_id = (strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id)
cluster_spec = strategy.cluster_resolver.cluster_spec()
write_model_path = write_filepath(model_path, task_type, task_id, cluster_spec)
multi_worker_model.save(write_model_path)

# A second model, built in the scope too, is fine-tuned from what the first has learned.
with strategy.scope():
    fine_tuned_model = build_and_compile_cnn_model()
    fine_tuned_model.set_weights(multi_worker_model.get_weights())
    fine_tuned_model.layers[1].trainable = False
    fine_tuned_model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.SGD(learning_rate=0.001),
        metrics=["accuracy"],
    )
fine_tuned_model = tfdist.distribute(fine_tuned_model)
history = fine_tuned_model.fit(multi_worker_dataset, epochs=2, steps_per_epoch=4)
print(history.history)

# The chief loads what it saved and trains it alone; the others remove what they wrote.
if _is_chief(task_type, task_id, cluster_spec):
    loaded_model = tf.keras.models.load_model(model_path)
    loaded_model.summary()
    print("Loaded:", [float(np.sum(weight)) for weight in loaded_model.get_weights()])
else:
    tf.io.gfile.rmtree(os.path.dirname(write_model_path))
