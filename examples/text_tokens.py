# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts as arrays of token numbers, and back."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

# Target of positions that the loss leaves out: the input of a text, and padding.
IGNORED = -1
# No end token: generation stops where it sees one.
PADDING = 0
# Ends the input; what follows is to be written.
SEPARATOR = "\n"


class Tokenizer(NamedTuple):
    """A way to write texts as token numbers.

    Attributes:
        encode: Function from a list of texts to a list of lists of token numbers.
        decode: Function from a list of token numbers to a text.
        start: Token in front of every text that is classified.
        end: Token behind every text.
    """

    encode: Callable
    decode: Callable
    start: int
    end: int


def byte_tokenizer():
    """Returns a tokenizer of UTF-8 bytes; token 256 is both start and end.

    Example:

    >>> tokenizer = byte_tokenizer()
    >>> tokenizer.encode(["Ab"]), tokenizer.decode([65, 98])
    ([[65, 98]], 'Ab')
    """
    return Tokenizer(
        encode=lambda texts: [list(text.encode()) for text in texts],
        decode=lambda tokens: bytes(t for t in tokens if t < 256).decode(errors="replace"),
        start=256,
        end=256,
    )


def hub_tokenizer(tokenizer, start, end):
    """Returns a keras-hub tokenizer in the form used here.

    Args:
        tokenizer: `keras_hub.tokenizers.Tokenizer`.
        start: Its token in front of a text.
        end: Its token behind a text.
    """

    def decode(tokens):
        # Releases of keras-hub return Python texts or tensors.
        text = tokenizer.detokenize(tokens)
        return tf.compat.as_text(text.numpy() if tf.is_tensor(text) else text)

    encode = lambda texts: [np.asarray(row).tolist() for row in tokenizer(texts)]
    return Tokenizer(encode, decode, start, end)


def pack_pairs(tokenizer, pairs, length):
    """Returns what a language model reads and what it should predict.

    A sequence is the input, a separator, the text and the end token. Every position
    predicts the next token, but only tokens of the text and its end count.

    Args:
        tokenizer: `Tokenizer`.
        pairs: List of pairs (input, text).
        length: Int, number of positions; what is longer is cut at the end.

    Returns:
        Dictionary of int32 `[pairs, length]`, `token_ids` and `padding_mask`, and the targets,
        int32 `[pairs, length]`, `IGNORED` where no token counts.

    Raises:
        ValueError: If an input leaves no room.
    """
    prompts = tokenizer.encode([mr + SEPARATOR for mr, _ in pairs])
    texts = tokenizer.encode([text for _, text in pairs])
    # One more than `length`: targets are the tokens one position later.
    sequences = [p + t + [tokenizer.end] for p, t in zip(prompts, texts, strict=True)]
    tokens, mask = _padded(sequences, length + 1)
    positions = np.arange(1, length + 1)
    starts = np.array([len(prompt) for prompt in prompts])
    _check_fit(starts, length)
    counts = (positions >= starts[:, None]) & (mask[:, 1:] == 1)
    targets = np.where(counts, tokens[:, 1:], IGNORED).astype(np.int32)
    return {"token_ids": tokens[:, :-1], "padding_mask": mask[:, :-1]}, targets


def pack_prompts(tokenizer, inputs, length):
    """Returns what a language model is to continue.

    Args:
        tokenizer: `Tokenizer`.
        inputs: List of inputs.
        length: Int, number of positions, what is written included.

    Returns:
        Dictionary of int32 `[inputs, length]`, `token_ids` and `padding_mask`.

    Raises:
        ValueError: If an input leaves no room.
    """
    prompts = tokenizer.encode([mr + SEPARATOR for mr in inputs])
    _check_fit(np.array([len(prompt) for prompt in prompts]), length)
    tokens, mask = _padded(prompts, length)
    return {"token_ids": tokens, "padding_mask": mask}


def written_text(tokenizer, tokens, prompt_mask):
    """Returns what a language model wrote behind a prompt, up to the end token.

    Args:
        tokenizer: `Tokenizer`.
        tokens: int `[length]`, the prompt and what follows.
        prompt_mask: int `[length]`, 1 for the prompt.
    """
    written = tokens[int(np.sum(prompt_mask)) :].tolist()
    end = written.index(tokenizer.end) if tokenizer.end in written else len(written)
    return tokenizer.decode(written[:end]).strip()


def pack_texts(tokenizer, texts, length):
    """Returns what a text encoder reads: start, text and end; cut and padded to `length`.

    Args:
        tokenizer: `Tokenizer`.
        texts: List of texts.
        length: Int, number of positions.

    Returns:
        Dictionary of int32 `[texts, length]`, `token_ids` and `padding_mask`.
    """
    sequences = [
        [tokenizer.start, *tokens[: length - 2], tokenizer.end]
        for tokens in tokenizer.encode(texts)
    ]
    tokens, mask = _padded(sequences, length)
    return {"token_ids": tokens, "padding_mask": mask}


def _padded(sequences, length):
    tokens = np.full((len(sequences), length), PADDING, np.int32)
    mask = np.zeros((len(sequences), length), np.int32)
    for row, sequence in enumerate(sequences):
        kept = sequence[:length]
        tokens[row, : len(kept)] = kept
        mask[row, : len(kept)] = 1
    return tokens, mask


def _check_fit(prompt_lengths, length):
    longest = prompt_lengths.max()
    if longest >= length:
        raise ValueError(
            f"The longest input has {longest} tokens, which leaves no room for a text. Received: "
            f"sequence_length={length}. Use a longer one, or shorter inputs."
        )
