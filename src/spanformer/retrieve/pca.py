"""Principal directions of keys: a key is stored as its `pca` largest coordinates.

    stored = (k − mean)·directionsᵀ        ‖q − k‖² = ‖stored q − stored k‖² + ‖what is left of q − what is left of k‖²

Distances of stored keys leave the second term out: they are never too large, and too small by at most
(‖left of q‖ + ‖left of k‖)².

Shapes: n keys, D numbers of one, P directions.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spanformer.core.files import replace_file
from spanformer.retrieve.header import Header

NAME = "pca.bin"
LEAST = 4  # sample keys for each direction


@dataclass(frozen=True, eq=False)
class Pca:
    mean: Tensor
    """[D] float32"""
    directions: Tensor
    """[P, D] float32, orthonormal"""

    def project(self, keys: Tensor) -> Tensor:
        """[n, D] → [n, P]"""
        return (keys.float() - self.mean) @ self.directions.T

    def left(self, keys: Tensor) -> Tensor:
        """[n]: the norm of what is not stored."""
        centred = keys.double() - self.mean
        stored = centred @ self.directions.double().T
        return (centred.square().sum(-1) - stored.square().sum(-1)).clamp_min(0).sqrt()

    def write(self, folder: Path) -> None:
        numbers = torch.cat([self.mean[None], self.directions]).numpy().astype("<f4")
        with replace_file(folder / NAME) as new:
            new.write_bytes(numbers.tobytes() + zlib.crc32(numbers.tobytes()).to_bytes(4, "little"))


def fit_pca(sample: Tensor, count: int) -> Pca:
    """The `count` principal directions of sample keys [n, D]."""
    if len(sample) < LEAST * count:
        raise ValueError(
            f"pca is {count}, and the text gives {len(sample):,} keys to find directions; expected {LEAST * count:,} "
            "or more: give more text, or fewer directions"
        )
    mean = sample.double().mean(0)
    centred = sample.double() - mean
    _, directions = torch.linalg.eigh(centred.T @ centred)  # ascending
    return Pca(mean.float(), directions.T.flip(0)[:count].float().contiguous())


def read_pca(folder: Path, header: Header) -> Pca | None:
    if not header.pca:
        return None
    path = folder / NAME
    expected = 4 * (1 + header.pca) * header.dim + 4
    if not path.is_file() or path.stat().st_size != expected:
        raise ValueError(f"{path} is missing or has not {expected:,} bytes; the datastore is damaged: build it again")
    content = path.read_bytes()
    if zlib.crc32(content[:-4]).to_bytes(4, "little") != content[-4:]:
        raise ValueError(f"{path} does not fit its checksum; the datastore is damaged: build it again")
    numbers = torch.from_numpy(np.frombuffer(content[:-4], "<f4").reshape(1 + header.pca, header.dim).copy())
    return Pca(numbers[0], numbers[1:])
