#!/usr/bin/env python
"""Stratified K-fold on a table, as in Kaggle's notebooks: early stopping, out-of-fold and averaged predictions."""

# In[1]:

import gc
import warnings

import numpy as np
import pandas as pd
import tensorflow.keras.backend as K
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import StandardScaler
from tensorflow import keras
from tensorflow.keras.callbacks import EarlyStopping, ReduceLROnPlateau, TerminateOnNaN
from tensorflow.keras.layers import BatchNormalization, Dense, Dropout, Input
from tensorflow.keras.models import Model

warnings.filterwarnings("ignore")


class CFG:
    seed = 42
    n_folds = 3
    epochs = 4
    batch_size = 64
    lr = 2e-2
    label_smoothing = 0.02


keras.utils.set_random_seed(CFG.seed)

# In[2]: data

rng = np.random.RandomState(CFG.seed)
columns = [f"f_{i:02d}" for i in range(10)]
data = pd.DataFrame(rng.normal(size=(400, len(columns))), columns=columns)
data["f_03"] = np.exp(data["f_03"])
data["target"] = (data.f_00 + data.f_01 * data.f_02 + 0.3 * data.f_03 + rng.normal(0, 0.7, 400) > 0.5).astype(int)
train, test = data.iloc[:310].reset_index(drop=True), data.iloc[310:].reset_index(drop=True)
train["f_00xf_01"] = train.f_00 * train.f_01
test["f_00xf_01"] = test.f_00 * test.f_01
FEATURES = [c for c in train.columns if c != "target"]
print(train.shape, test.shape, train.target.mean())

# In[3]: model


def create_model(n_features):
    inp = Input(shape=(n_features,))
    x = BatchNormalization()(inp)
    for units in (32, 16):
        x = Dense(units, activation="swish")(x)
        x = BatchNormalization()(x)
        x = Dropout(0.15)(x)
    out = Dense(1, activation="sigmoid")(x)
    model = Model(inputs=inp, outputs=out)
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=CFG.lr),
        loss=keras.losses.BinaryCrossentropy(label_smoothing=CFG.label_smoothing),
        metrics=[keras.metrics.AUC(name="auc")],
    )
    return model


# In[4]: training

oof = np.zeros(len(train))
predictions = np.zeros(len(test))
fold_results = []
skf = StratifiedKFold(n_splits=CFG.n_folds, shuffle=True, random_state=CFG.seed)
for fold, (trn_idx, val_idx) in enumerate(skf.split(train[FEATURES], train["target"])):
    K.clear_session()
    scaler = StandardScaler().fit(train.loc[trn_idx, FEATURES])
    x_trn, y_trn = scaler.transform(train.loc[trn_idx, FEATURES]), train.loc[trn_idx, "target"].values
    x_val, y_val = scaler.transform(train.loc[val_idx, FEATURES]), train.loc[val_idx, "target"].values

    model = create_model(len(FEATURES))
    es = EarlyStopping(monitor="val_auc", mode="max", patience=1, min_delta=0.005, restore_best_weights=True, verbose=0)
    rlr = ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, verbose=0)
    history = model.fit(
        x_trn,
        y_trn,
        validation_data=(x_val, y_val),
        epochs=CFG.epochs,
        batch_size=CFG.batch_size,
        callbacks=[es, rlr, TerminateOnNaN()],
        verbose=0,
    )
    oof[val_idx] = model.predict(x_val, batch_size=128, verbose=0).ravel()
    predictions += model.predict(scaler.transform(test[FEATURES]), batch_size=128, verbose=0).ravel() / CFG.n_folds
    score = model.evaluate(x_val, y_val, batch_size=50, verbose=0, return_dict=True)
    fold_results.append(score["auc"])
    print(
        f"Fold {fold}: best epoch {es.best_epoch + 1} of {len(history.epoch)}, val_auc {max(history.history['val_auc']):.5f}"
    )
    print("  loss", history.history["loss"], "restored", score)
    del model
    gc.collect()

# In[5]: results

print("Folds:", fold_results)
print(f"OOF AUC {roc_auc_score(train.target, oof):.5f}, log loss {log_loss(train.target, oof):.5f}")
print(f"Test AUC {roc_auc_score(test.target, predictions):.5f}")
submission = pd.DataFrame({"id": test.index, "target": predictions})
submission.to_csv("submission.csv", index=False)
print(submission.head())
