"""ETC's second pre-training task (Ainslie et al., 2020, https://arxiv.org/abs/2004.08483): contrastive predictive
coding (van den Oord et al., 2018, https://arxiv.org/abs/1807.03748) of whole sentences.

Some sentences of a text are masked. The output of a masked sentence's global token must match the output of a global
token that sees only that sentence:

    loss = mean_s −log( exp(p_s·c_s / √dim) / Σ_t exp(p_s·c_t / √dim) )

p_s: the output of sentence s's global token in the masked text; c_s: the output of one that reads only sentence s. The
other masked sentences of the batch are the negatives. Shapes: S masked sentences of a batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SHARE = 0.25
"""weight of this loss; with the masked-token loss at 1, the paper's 0.2 to 0.8"""


def nce(predicted: Tensor, codes: Tensor) -> Tensor:
    """predicted and codes [S, dim] → a scalar, which is log S for uniform predictions."""
    if predicted.shape != codes.shape or predicted.ndim != 2 or len(predicted) < 2:
        raise ValueError(
            f"predicted has shape {list(predicted.shape)} and codes {list(codes.shape)}; expected one [S, dim], S at "
            "least 2, because each code is contrasted with the others"
        )
    scores = predicted @ codes.mT / predicted.shape[1] ** 0.5
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))
