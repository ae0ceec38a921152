"""Sequence-parallel attention and the collectives, in float64, against one process."""

import math

import pytest
import torch
from spawn import spawn

import parallel
from model import attend_each

LENGTHS = [13, 1, 7, 16]  # 37 tokens: nothing divides them, and rank boundaries fall inside samples
HEADS, WIDTH = 4, 8


def whole(seed=0, lengths=LENGTHS, dtype=torch.float64):
    """q, k, v and an upstream gradient for the whole pack."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, sum(lengths), HEADS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def reference(lengths):
    q, k, v, grad = whole(lengths=lengths)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = attend_each(q, k, v, lengths, lengths)
    out.backward(grad)
    return torch.stack((out.detach(), q.grad, k.grad, v.grad))


def attention_through(ulysses, ring, lengths, dtype=torch.float64):
    """Output and gradients of this rank's tokens, gathered: (4, L, H, D)."""
    layout = parallel.start(ulysses, ring)
    seam = layout.seam()
    q, k, v, grad = whole(lengths=lengths, dtype=dtype)
    local = [seam.shard(x).clone().requires_grad_() for x in (q, k, v)]
    out = seam.attention(*local, lengths)
    out.backward(seam.shard(grad))
    parts = torch.stack((out.detach(), *(x.grad for x in local)), 1)
    return seam.gather(parts)[: sum(lengths)].transpose(0, 1)


def many(cases):
    return [attention_through(*case) for case in cases]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_attention_equals_one_process(world):
    """If this goes, attention over several ranks (output, dQ, dK or dV) is not attention: Ulysses, ring or both."""
    layouts = {2: [(2, 1), (1, 2)], 3: [(1, 3)], 4: [(4, 1), (2, 2), (1, 4)]}[world]
    packs = [LENGTHS, [37], [1], [2, 1]]  # the last two leave ranks without a single token
    cases = [(*layout, lengths) for layout in layouts for lengths in packs]
    for rank_results in spawn(many, world, cases):
        for case, result in zip(cases, rank_results, strict=True):
            difference = (result - reference(case[2])).abs().amax((1, 2, 3))
            assert difference.max() < 1e-13, (case, difference)
