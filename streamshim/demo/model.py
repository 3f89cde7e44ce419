"""The tiny language model of the demo: its sizes and its weights, the same on every machine.

x      = embedding[token]
h      = a*h + b*x         the state-space layer, done by the custom kernel, in place on the state
y      = c*h
token  = argmax(bias + projection @ y)
"""

from __future__ import annotations

import random
from dataclasses import dataclass

VOCABULARY = 64
CHANNELS = 64
#: How many tokens are written.
TOKENS = 14
#: The token that stands before the first one.
PROMPT = 1
#: Never the right answer, since `bias` forbids it, and always the answer when the logits are NaN: torch's argmax takes
#: NaN for the largest value and returns the first. So a step whose kernel did not run is wrong for certain.
PADDING = 0

#: With these weights the best token leads by 0.8 at each step, far more than float32 can lose, and the tokens depend
#: on the state.
_SEED = 14

Matrix = list[list[float]]


@dataclass(frozen=True)
class Weights:
    """The weights, as plain floats.

    Attributes:
        embedding: one row for each token.
        projection: one row for each token.
        bias: added to the logits.
        a: how much of the state stays.
        b: how much of the input comes in.
        c: how the state is read.
    """

    embedding: Matrix
    projection: Matrix
    bias: list[float]
    a: list[float]
    b: list[float]
    c: list[float]


def weights() -> Weights:
    """Random weights from a fixed seed."""
    source = random.Random(_SEED)
    embedding = [[source.gauss(0, 1) for _ in range(CHANNELS)] for _ in range(VOCABULARY)]
    projection = [[source.gauss(0, 1) for _ in range(CHANNELS)] for _ in range(VOCABULARY)]
    a = [source.uniform(0.5, 0.95) for _ in range(CHANNELS)]
    b = [source.uniform(0.5, 1.5) for _ in range(CHANNELS)]
    c = [source.choice((-1, 1)) * source.uniform(0.5, 1.5) for _ in range(CHANNELS)]
    bias = [0.0] * VOCABULARY
    bias[PADDING] = -1e9
    return Weights(embedding, projection, bias, a, b, c)
