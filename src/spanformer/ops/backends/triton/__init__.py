"""Attention on GPUs by kernels of our own, in Triton (https://github.com/triton-lang/triton). A kernel reads the spans
on the device and visits only the tiles of pairs that they reach: there are no block lists, no host waits for the
device, and new spans or lengths compile nothing. Sums are in a fixed order, without atomics.

    pairs.py            scores, weights and which tiles a tile sees: what all kernels share
    tokens.py           what a tile of queries or keys loads
    scores.py           scores of a tile of queries over a tile of keys
    forward.py          the forward pass, and the merge of its parts if keys are split
    backward_q.py       gradients of queries, spans and sink logits
    backward_kv.py      gradients of keys, values and key biases
    backward_bias.py    the gradient of a learned distance bias
    decode.py           one query per row over rings of keys and values
    launch.py, gradients.py, operator.py     arguments and launches, and the torch operators
    tiles.py, variants.py                    tile sizes, and all that a GPU would compile

Triton is imported in the first launch. With TRITON_INTERPRET=1 in the environment, kernels run on CPU tensors: slowly,
for tests.
"""

from __future__ import annotations

from spanformer.ops.backends.base import Backend
from spanformer.ops.backends.triton.checks import refuses, unusable
from spanformer.ops.backends.triton.operator import attend_triton, part_gradients

BACKEND = Backend("triton", unusable, refuses, attend_triton, part_gradients)
