"""spanformer: attention heads that learn how far to look, and cost only that much.

A public name is imported when it is first used (PEP 562), so `import spanformer` and the command line's help do not
wait for torch. A new one takes a line in the table, and one below TYPE_CHECKING for editors and type checkers.
"""

import importlib
from typing import TYPE_CHECKING

from spanformer.core.version import VERSION as __version__  # noqa: F401

if TYPE_CHECKING:
    from spanformer.attention import AdaptiveSpan as AdaptiveSpan
    from spanformer.attention import DynamicSpan as DynamicSpan
    from spanformer.infer import Sampling as Sampling
    from spanformer.infer import generate as generate
    from spanformer.memory import Cache as Cache
    from spanformer.memory import HeadCache as HeadCache
    from spanformer.model.config import ModelConfig as ModelConfig
    from spanformer.model.encoder import Encoder as Encoder
    from spanformer.model.lm import LM as LM
    from spanformer.model.load import load as load
    from spanformer.model.seq2seq import Seq2Seq as Seq2Seq
    from spanformer.ops import Attended as Attended
    from spanformer.ops import BlockIndex as BlockIndex
    from spanformer.ops import HeadGroups as HeadGroups
    from spanformer.ops import Rings as Rings
    from spanformer.ops import Rule as Rule
    from spanformer.ops import Union as Union
    from spanformer.ops import attend as attend
    from spanformer.ops import attend_rings as attend_rings
    from spanformer.ops import backends as backends
    from spanformer.ops import choose_backend as choose_backend
    from spanformer.ops import merge as merge

_HOME = {
    "AdaptiveSpan": "spanformer.attention",
    "Attended": "spanformer.ops",
    "BlockIndex": "spanformer.ops",
    "Cache": "spanformer.memory",
    "DynamicSpan": "spanformer.attention",
    "Encoder": "spanformer.model.encoder",
    "HeadCache": "spanformer.memory",
    "HeadGroups": "spanformer.ops",
    "LM": "spanformer.model.lm",
    "ModelConfig": "spanformer.model.config",
    "Rings": "spanformer.ops",
    "Rule": "spanformer.ops",
    "Sampling": "spanformer.infer",
    "Seq2Seq": "spanformer.model.seq2seq",
    "Union": "spanformer.ops",
    "attend": "spanformer.ops",
    "attend_rings": "spanformer.ops",
    "backends": "spanformer.ops",
    "choose_backend": "spanformer.ops",
    "generate": "spanformer.infer",
    "load": "spanformer.model.load",
    "merge": "spanformer.ops",
}

__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'spanformer' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
