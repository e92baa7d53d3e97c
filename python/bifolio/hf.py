# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face transformers on a paged cache::

    model = AutoModelForCausalLM.from_pretrained(…, attn_implementation="bifolio")
    ids = model.generate(**inputs, past_key_values=bifolio.hf.Cache(model, memory="1GiB"))

Importing this module registers the attention function and its mask. It runs decoders with causal attention, with or
without sliding windows, soft caps and sinks. A batch may be padded; padding takes no blocks. Tested with transformers
5.23.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface

from . import _core
from ._cache import Cache as PagedCache
from ._values import Error

_names = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """A layer as transformers sees it: how many tokens it holds. K and V are in the paged cache."""

    is_sliding = False  # windows are the attention's own: masks have all positions
    is_croppable = True
    supports_early_init = False

    def __init__(self, owner: Cache) -> None:
        super().__init__()
        self._owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.is_initialized = True
        key_states._bifolio_cache = self._owner  # type: ignore[attr-defined]  # for the attention function
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self._owner._num_positions  # of forward passes that reached their end

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner._num_positions + query_length, 0

    def get_max_length(self) -> int:
        return -1


class Cache(transformers.Cache):  # type: ignore[misc]
    """The cache of a model for `generate` and for calls of the model. `options` are those of `bifolio.Cache`: memory or
    blocks (or neither, and reserve), kv_dtype, layout, block_size, max_sequences, threads."""

    def __init__(self, model: transformers.PreTrainedModel, **options: Any) -> None:
        config = model.config.get_text_config(decoder=True)
        num_layers = config.num_hidden_layers
        super().__init__(layers=[_Layer(self) for _ in range(num_layers)])
        if model.dtype not in _names:
            raise Error("unsupported", f"the model computes in {model.dtype}; float32, float16 and bfloat16 are taken")
        types = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        others = sorted(set(types or ()) - {"full_attention", "sliding_attention"})
        if others:
            raise Error("unsupported", f"the model has layers of the kind {others[0]}; full_attention and "
                                       "sliding_attention are taken")
        windowed = [window is not None and (types is None or types[i] == "sliding_attention") for i in range(num_layers)]
        heads = config.num_attention_heads
        #: the cache itself, with its counters and drawings
        self.paged = PagedCache(
            layers=num_layers, q_heads=heads, kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads, dtype=_names[model.dtype],
            windows=[window - 1 if has_window else -1 for has_window in windowed],
            device="cpu" if model.device.type == "cpu" else str(model.device), **options)
        self._windows = [window if has_window else None for has_window in windowed]
        self._seqs: list[int] = []
        self._step: _core.Step | None = None
        self._num_positions = 0  # padding included, as transformers counts
        self._rows: torch.Tensor | None = None  # of the step's tokens among those of the batch; None: all

    def __del__(self) -> None:
        if hasattr(self, "_seqs"):
            self.reset()

    @property
    def batch_size(self) -> int:
        return len(self._seqs) or -1

    def _begin(self, batch: int, num_new: int, mask: torch.Tensor | None) -> None:
        if self._step is not None:  # the forward pass before did not reach its end
            self._step.drop()
            self._step = None
        core = self.paged._core
        if not self._seqs:
            opened: list[int] = []
            try:
                for _ in range(batch):
                    opened.append(core.open([], b"", 0)[0])
            except Exception:  # nothing is open that nobody knows
                self._free(opened)
                raise
            self._seqs = opened
        if len(self._seqs) != batch:
            raise Error("invalid_argument", f"the batch has {batch} rows; the cache holds {len(self._seqs)} sequences")
        self._rows = None
        counts = [num_new] * batch
        if mask is not None:
            real = mask[:, -num_new:].bool()
            if not bool(real.all()):
                counts = real.sum(1).tolist()
                self._rows = real.reshape(-1).nonzero().squeeze(1)
        rows = [(seq, count) for seq, count in zip(self._seqs, counts) if count > 0]
        self._step = _core.Step(core, [(seq, []) for seq, _ in rows], [count for _, count in rows], 0)

    def _attend(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
                scale: float | None, soft_cap: float, sinks: torch.Tensor | None) -> torch.Tensor:
        batch, q_heads, num_new, _ = q.shape
        if index == 0:
            self._begin(batch, num_new, mask)
        if self._step is None:
            raise Error("failed_precondition", f"layer {index} is computed before layer 0")
        # [batch, heads, tokens, dim] -> rows of tokens; without a copy where that is how they lie
        flat = [t.detach().transpose(1, 2).reshape(batch * num_new, t.shape[1], t.shape[3]) for t in (q, k, v)]
        if self._rows is not None:
            flat = [t.index_select(0, self._rows) for t in flat]
        out = self._step.attend(index, *flat, None, scale, soft_cap, sinks, None, None)
        if self._rows is not None:
            out = out.new_zeros(batch * num_new, *out.shape[1:]).index_copy_(0, self._rows, out)
        if index == len(self.layers) - 1:
            self._step.commit(None)
            self._step = None
            self._num_positions += num_new
        return out.view(batch, num_new, q_heads, v.shape[3])

    def reset(self) -> None:
        """Frees all sequences."""
        if self._step is not None:
            self._step.drop()
            self._step = None
        self._free(self._seqs)
        self._seqs = []
        self._num_positions = 0

    def _free(self, seqs: list[int]) -> None:
        for seq in seqs:
            self.paged._core.free(seq)

    def _take(self, indices: list[int]) -> None:
        """The sequences at these places, each as often as it is listed: forks, which copy nothing."""
        core, old = self.paged._core, self._seqs
        if not old:
            return
        used: set[int] = set()
        taken: list[int] = []
        forked: list[int] = []
        try:
            for i in indices:
                if i in used:
                    forked.append(core.fork(old[i]))
                taken.append(forked[-1] if i in used else old[i])
                used.add(i)
        except Exception:  # then it holds what it held
            self._free(forked)
            raise
        self._free([seq for i, seq in enumerate(old) if i not in used])
        self._seqs = taken

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._take(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        chosen = indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices
        self._take(chosen.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._take([i for i in range(len(self._seqs)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError("crop takes the number of tokens to remove as a negative number")
        for seq in self._seqs:
            held = self.paged._core.num_committed(seq)
            self.paged._core.truncate(seq, max(0, held + tokens_to_remove))
        self._num_positions = max(0, self._num_positions + tokens_to_remove)

    def __repr__(self) -> str:
        return f"bifolio.hf.Cache({len(self._seqs)} sequences of {self.get_seq_length()} positions; {self.paged})"


def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
              sliding_window: int | None = None, softcap: float | None = None, is_causal: bool | None = None,
              s_aux: torch.Tensor | None = None, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """What `attn_implementation="bifolio"` calls for each layer."""
    cache = getattr(key, "_bifolio_cache", None)
    if not isinstance(cache, Cache):
        raise Error("unsupported", "attention of bifolio needs past_key_values=bifolio.hf.Cache(model)")
    index: int = module.layer_idx  # type: ignore[assignment]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if dropout != 0.0 or not causal or kwargs.get("output_attentions"):
        raise Error("unsupported", "attention of bifolio has no dropout, is causal, and does not return its weights")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise Error("unsupported", f"a mask of {attention_mask.dim()} dimensions is given; bifolio takes [batch, positions]")
    if sliding_window != cache._windows[index]:
        raise Error("unsupported", f"layer {index} has the sliding window {sliding_window}; its model's configuration "
                                   f"says {cache._windows[index]}")
    sinks = None if s_aux is None else s_aux.detach().float()
    return cache._attend(index, query, key, value, attention_mask, scaling, softcap or 0.0, sinks), None


def _padding_mask(batch_size: int, q_length: int, kv_length: int, attention_mask: torch.Tensor | None = None,
                  use_vmap: bool = False, **kwargs: Any) -> torch.Tensor | None:
    """Which positions are real, [batch, positions]; None when all are. Causality and windows are the attention's own."""
    if use_vmap:
        raise Error("unsupported", "attention of bifolio takes causal masks with padding, and no others")
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask


transformers.AttentionInterface.register("bifolio", attention)
AttentionMaskInterface.register("bifolio", _padding_mask)
