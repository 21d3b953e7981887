"""`spanformer import-original CHECKPOINT.pt OUT`: a checkpoint of the adaptive-span paper's code as a model of ours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from spanformer.cli.leaf import Leaf


@dataclass(frozen=True)
class ImportOptions:
    checkpoint: tyro.conf.Positional[str]
    """the file that code saved"""
    out: tyro.conf.Positional[str]
    """folder to write the model to; spanformer.load reads it"""


def run(options: ImportOptions) -> None:
    from spanformer.model.original import import_original

    print(import_original(Path(options.checkpoint), Path(options.out)))
    print(f"written to {options.out}; try  spanformer spans {options.out}")


IMPORT = Leaf(ImportOptions, run)
