# SPDX-License-Identifier: Apache-2.0
"""A model of a few lines, and float64 attention to compare with."""

import bifolio as bf
import numpy as np

LAYERS, Q_HEADS, KV_HEADS, DIM = 2, 4, 2, 8


def make(**changes):
    settings = dict(layers=LAYERS, q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=DIM, block_size=4, blocks=20,
                    host_memory="64KiB", prefix=True, seed=(1, 2), threads=1)
    settings.update(changes)
    return bf.Cache(**settings)


def rows(step, layer, what, heads):
    """Rows that depend on token and position alone, as a model's projections do."""
    tokens, positions = np.asarray(step.tokens), np.asarray(step.positions)
    i = np.arange(heads * DIM)
    angle = 0.3 * tokens[:, None] + 0.7 * positions[:, None] + 1.1 * i[None, :] + what + 2 * layer
    return np.sin(angle).astype(np.float32).reshape(len(tokens), heads, DIM)


def run(step):
    for layer in range(LAYERS):
        out = step.attend(layer, rows(step, layer, 0, Q_HEADS), rows(step, layer, 1, KV_HEADS), rows(step, layer, 2, KV_HEADS))
    return out


class plain_step:
    """Tokens and positions of a whole sequence."""

    def __init__(self, tokens):
        self.tokens, self.positions = np.array(tokens), np.arange(len(tokens))


def expected(tokens, layer=LAYERS - 1, scale=DIM**-0.5):
    """Causal attention in float64 over the whole text."""
    whole = plain_step(tokens)
    q, k, v = (rows(whole, layer, what, heads).astype(np.float64) for what, heads in ((0, Q_HEADS), (1, KV_HEADS), (2, KV_HEADS)))
    return attention(q, k, v, scale)[0]


def attention(q, k, v, scale, window=None, soft_cap=0.0, sinks=None, slopes=None):
    """One sequence's new tokens q at the end of its keys, in float64: (out, lse)."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    logits = np.einsum("qhd,khd->hqk", q, k) * scale
    if soft_cap:
        logits = soft_cap * np.tanh(logits / soft_cap)
    distance = np.arange(len(k))[None, :] - (np.arange(len(q))[:, None] + len(k) - len(q))
    if slopes is not None:
        logits += slopes[:, None, None] * distance
    logits[:, distance > 0] = -np.inf
    if window is not None:
        logits[:, distance < -window] = -np.inf
    weights = np.exp(logits)
    total = weights.sum(-1)
    if sinks is not None:
        total = total + np.exp(sinks)[:, None]
    return np.einsum("hqk,khd->qhd", weights / total[:, :, None], v), np.log(total).T
