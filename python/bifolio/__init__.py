# SPDX-License-Identifier: Apache-2.0
"""Paged KV cache and attention for your own inference engine.

A `Cache` is the cache of one model on one device. `open` gives a `Sequence`, `step` computes the next tokens of some of
them, layer by layer; a `Scheduler` decides which. Arrays are those of any framework that speaks DLPack; none is imported
here, and none is copied. `bifolio.hf` runs models of Hugging Face transformers.
"""

from . import _core
from ._cache import Cache, Layer, Plane, Sequence, Step
from ._functions import Replay, attention, merge, metrics_text, replay
from ._scheduler import Row, ScheduledStep, Scheduler, Token
from ._values import CacheStats, Error, OutOfBlocks, PrefixStats, SchedulerStats, Stats, Svg

__version__: str = _core.version
__all__ = ["Cache", "CacheStats", "Error", "Layer", "OutOfBlocks", "Plane", "PrefixStats", "Replay", "Row",
           "ScheduledStep", "Scheduler", "SchedulerStats", "Sequence", "Stats", "Step", "Svg", "Token", "attention",
           "merge", "metrics_text", "replay"]
