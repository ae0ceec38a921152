"""Sequence-parallel attention and the collectives, in float64, against one process."""

import pytest
import torch
from spawn import spawn

import parallel
from model import LOCAL, WanConfig, WanDiT, attend_each

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


def predictions(sp, rank: int, world: int):
    """A loss of every rank's own, taken of the whole gathered prediction, and its parameters' gradients.

    Ranks weigh the prediction differently: with equal losses a wrong backward can pass for a right one.
    """
    torch.manual_seed(0)
    config = WanConfig(dim=48, ffn_dim=80, num_heads=4, num_layers=1, text_dim=8, text_len=6, freq_dim=16)
    model = WanDiT(config).double()
    torch.nn.init.normal_(model.head.head.weight, std=0.1)
    latents = [torch.randn(16, f, 2, 6, dtype=torch.float64) for f in (3, 1, 1)]  # 15 tokens
    text = [torch.randn(n, 8, dtype=torch.float64) for n in (2, 6, 1)]
    weights = torch.randn(world, 3, dtype=torch.float64)
    ours = model(latents, [900.0, torch.tensor([500.0]), 0.0], text, sp=sp)
    ranks = range(world) if sp is LOCAL else [rank]
    loss = sum(w * x.square().sum() for r in ranks for w, x in zip(weights[r], ours, strict=True))
    return loss, [p for p in model.parameters()], ours


def through_gather(layouts):
    results = []
    for ulysses, ring in layouts:
        layout = parallel.start(ulysses, ring)
        loss, parameters, ours = predictions(layout.seam(), layout.rank, layout.world)
        loss.backward()
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        results.append((layout.sum(loss.detach()), [layout.sum(g) for g in grads], [x.detach() for x in ours]))
    return results


def gather_error(world: int, layouts, spawned) -> float:
    """The largest relative difference of losses, predictions and summed gradients from one process."""
    loss, parameters, ours = predictions(LOCAL, 0, world)
    grads = torch.autograd.grad(loss, parameters)
    worst = 0.0
    for results in spawned:
        for total, summed, gathered in results:
            pairs = [(total, loss), *zip(summed, grads, strict=True), *zip(gathered, ours, strict=True)]
            worst = max(worst, *(float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs))
    return worst


@pytest.mark.parametrize("world, layouts", [(2, [(2, 1), (1, 2)]), (4, [(2, 2)])])
def test_gathered_predictions_and_their_gradients(world, layouts):
    """If this goes, sampling over several ranks gives another video, or a loss taken of gathered predictions (a
    fork's, a reward's) trains on part of its gradient."""
    assert gather_error(world, layouts, spawn(through_gather, world, layouts)) < 1e-12


def test_split_of_sequence_parallel_ranks():
    """If this goes, --sp 8 no longer picks the layout that the README promises, or a bad one is not refused."""
    assert parallel.split_sp(8, 12, 8, 0, 0) == (4, 2)
    assert parallel.split_sp(8, 40, 4, 0, 0) == (4, 1)
    assert parallel.split_sp(8, 12, 4, 0, 4) == (1, 4)
    assert parallel.split_sp(8, 12, 0, 2, 2) == (2, 2)
    assert parallel.split_sp(6, 12, 0, 0, 0) == (1, 1)
    for world, heads, sp, ulysses, ring, words in (
        (8, 12, 8, 8, 0, "12 heads do not split over --ulysses 8; use --ulysses 4 --ring 2"),
        (6, 12, 4, 0, 0, "--sp 4 does not divide the 6 processes"),
        (8, 12, 8, 2, 2, "--ulysses 2 x --ring 2 is not --sp 8; use --ulysses 4 --ring 2"),
    ):
        with pytest.raises(ValueError, match=words):
            parallel.split_sp(world, heads, sp, ulysses, ring)


def test_plain_attention_is_the_kernels():
    """If this goes, float32 and float64 on a GPU, which take the spelled-out way, differ from the flash kernels; or
    the backward of a part from the global log-sum-exp is not exact."""
    q, k, v, grad = whole()
    halves = [slice(0, 20), slice(20, 37)]
    out, lse = parallel.plain_forward(q, k, v)
    for a, b in zip(parallel.flash_forward(q, k, v), (out, lse), strict=True):
        assert (a - b).abs().max() < 1e-13
    whole_grads = parallel.plain_backward(grad, q, k, v, out, lse)
    for backward in (parallel.plain_backward, parallel.flash_backward):
        parts = [backward(grad, q, k[part], v[part], out, lse) for part in halves]
        dq, dk, dv = sum(p[0] for p in parts), torch.cat([p[1] for p in parts]), torch.cat([p[2] for p in parts])
        for a, b in zip((dq, dk, dv), whole_grads, strict=True):
            assert (a - b).abs().max() < 1e-13
