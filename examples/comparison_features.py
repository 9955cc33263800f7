# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Features of compare.py's linear tasks: nothing in them is learnt here; they are kept on disk."""

import pathlib
import time

import convolution_features
import numpy as np
import scattering

# Scattering channels are standardised together, three at a time, in each example.
_GROUPS = 27
# Texts that are encoded between two lines of progress, and what they are cut to, in tokens.
_TEXTS_AT_ONCE, _TEXT_LENGTH = 2048, 24


def scattered(images, options, name):
    """Returns scattering features of images, of norm 1.

    Args:
        images: Float `[images, height, width, 1]`.
        options: `comparison_tasks.Options`.
        name: Name of the data set.
    """
    return _kept(f"{name}_scattering", len(images), options, lambda: _scattered(images))


def convolved(images, options, name):
    """Returns features by random convolutions, of norm 1.

    Args:
        images: Float `[images, height, width, 1]`.
        options: `comparison_tasks.Options`.
        name: Name of the data set.
    """
    compute = lambda: convolution_features.features(images[..., 0])
    return _kept(f"{name}_convolutions", len(images), options, compute)


def encoded(texts, options):
    """Returns embeddings of texts, of norm 1, with a constant for the bias.

    Args:
        texts: List of texts.
        options: `comparison_tasks.Options`.
    """
    name = f"definitions_{encoder(options)}"
    return with_constant(_kept(name, len(texts), options, lambda: _encoded(texts, options)))


def encoder(options):
    """Returns the name of the encoder: "minilm", or "tiny", a random one to see it work.

    Args:
        options: `comparison_tasks.Options`.
    """
    return "tiny" if options.quick else "minilm"


def normed(features):
    """Returns features of norm 1; overwrites them.

    Args:
        features: Float `[examples, features]`.
    """
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    return features


def with_constant(features):
    """Appends 0.1 to features of norm 1: a bias that learns more slowly.

    Args:
        features: Float `[examples, features]`.
    """
    result = np.full((len(features), features.shape[1] + 1), 0.1, np.float32)
    result[:, :-1] = features
    return result


def _kept(name, count, options, compute):
    """Returns what is on disk, or computes it and keeps it there, if there is a folder for it."""
    path = None
    if options.cache_dir is not None:
        size = f"{'quick_' * options.quick}{count}"
        path = pathlib.Path(options.cache_dir) / f"{name}_{size}.npy"
        if path.exists():
            return np.load(path)
    features = normed(compute()).astype(np.float16)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with open(part, "wb") as file:
            np.save(file, features)
        part.replace(path)
    return features


def _scattered(images):
    seconds = time.monotonic()

    def progress(done, total):
        if done == total or not done % 5000:
            passed = time.monotonic() - seconds
            print(f"Scattering features: {done} of {total} images ({passed:.0f} s).", flush=True)

    features = scattering.features(images[..., 0], progress)
    # Statistics of the example alone: they tell nothing about others.
    groups = features.reshape(len(images), _GROUPS, -1)
    groups -= groups.mean(2, keepdims=True)
    groups /= groups.std(2, keepdims=True) + 1e-4
    return features.reshape(len(images), -1)


def _encoded(texts, options):
    # Imported late: keras-hub takes seconds, and only this needs it.
    import text_models
    import text_tokens

    start = time.monotonic()
    model, tokenizer = text_models.text_encoder(encoder(options), _TEXT_LENGTH)
    embeddings = np.zeros((len(texts), model.output.shape[1]), np.float32)
    # Texts that are about as long need little padding.
    order = np.argsort([len(text) for text in texts], kind="stable")
    for first in range(0, len(texts), _TEXTS_AT_ONCE):
        some = order[first : first + _TEXTS_AT_ONCE]
        packed = text_tokens.pack_texts(tokenizer, [texts[i] for i in some], _TEXT_LENGTH)
        longest = packed["padding_mask"].sum(1).max()
        tokens = {name: values[:, :longest] for name, values in packed.items()}
        embeddings[some] = model.predict(tokens, batch_size=64, verbose=0)
        passed = time.monotonic() - start
        print(f"Embeddings: {first + len(some)} of {len(texts)} ({passed:.0f} s).", flush=True)
    return embeddings
