"""The endless stream of positions, and how a step's samples are divided over ranks and packs. Pure functions.

A sample is named by its position p in one endless stream, and all that is random about it follows from (seed, p,
purpose). Nothing here keeps a state or knows of other processes, so a resumed run needs the step number and no more,
and every rank that needs a number computes the same one. B: samples of a step over the whole job.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

# ---- The position stream


@dataclass(frozen=True)
class Draw:
    """What the sample at one position of the stream is made of."""

    position: int
    index: int  # of the item
    variant: int  # which of the item's clips
    dropped: bool  # whether the empty prompt stands in for its caption
    uniform: float  # in [0, 1), of which the training sigma is made


def generator(seed: int, position: int, purpose: str) -> torch.Generator:
    """The random numbers of one position for one purpose, alike on every rank. On the CPU, since CUDA's generators
    differ between devices; it keeps 32 bits of a seed, so of 100000 positions some two, far apart, may share noise."""
    digest = hashlib.blake2b(f"{seed}/{position}/{purpose}".encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, n: int) -> Tensor:
    return torch.randperm(n, generator=generator(seed, epoch, "permutation"))


def sample_index(seed: int, position: int, n: int) -> int:
    """Which of n samples stands at a position: each once per epoch, in an order of the epoch's own, and no position
    is skipped where an epoch ends within a batch."""
    return int(permutation(seed, position // n, n)[position % n])


def stratified_uniforms(seed: int, step: int, batch_size: int) -> Tensor:
    """(B,) float64 in [0, 1), one in each stratum of width 1/B: the timesteps of a step then cover the whole schedule,
    which takes most of the noise out of the loss. Each on its own is uniform, so expectations stay."""
    strata = torch.randperm(batch_size, generator=generator(seed, step, "strata"))
    within = [
        torch.rand((), generator=generator(seed, position, "uniform"), dtype=torch.float64)
        for position in range(step * batch_size, (step + 1) * batch_size)
    ]
    uniforms = (strata + torch.stack(within)) / batch_size
    return uniforms.clamp(max=1 - 2**-53)  # the last stratum's top may round to 1


def draws(step: int, batch_size: int, seed: int, dataset, caption_dropout: float = 0.0) -> list[Draw]:
    """The B draws of a step: positions step B ... step B + B - 1. `dataset` has len() and variants(index)."""
    uniforms = stratified_uniforms(seed, step, batch_size).tolist()
    result = []
    for position, uniform in enumerate(uniforms, step * batch_size):
        index = sample_index(seed, position, len(dataset))
        variant = torch.randint(dataset.variants(index), (), generator=generator(seed, position, "variant"))
        chance = torch.rand((), generator=generator(seed, position, "dropout"), dtype=torch.float64)
        result.append(Draw(position, index, int(variant), bool(chance < caption_dropout), uniform))
    return result


# ---- Packs


def sample_cost(tokens: int, dim: int, ffn_dim: int, text_len: int = 512) -> float:
    """Floating point operations of one DiT block's forward on a sample; the other costs of a step are in proportion.

    Linear layers take 2 x inputs x outputs per token: q, k, v, o of self-attention, q, o of cross-attention, and the
    two of the feed-forward; k, v of cross-attention run over the text. Attention takes 4 x width x queries x keys.
    """
    linear = 2 * tokens * (6 * dim**2 + 2 * dim * ffn_dim) + 2 * text_len * 2 * dim**2
    return float(linear + 4 * dim * tokens * (tokens + text_len))


def assign_packs(tokens: Sequence[int], costs: Sequence[float], ranks: int, pack_tokens: int) -> list[list[list[int]]]:
    """Which rank computes which samples of a step, and in which packs: result[rank][pack] is a list of sample numbers.

    Samples go, costliest first, to the rank with the least cost so far, which leaves the ranks within one sample's
    cost of each other. A rank's samples then fill packs of at most `pack_tokens` (0: one pack), longest first, each
    into the first pack with room. All ranks get as many packs as the one with most, the rest being empty, since a
    pack's collectives need every rank. Raises ValueError for a sample that fits no pack.
    """
    if pack_tokens and max(tokens) > pack_tokens:
        raise ValueError(
            f"a sample of {max(tokens)} tokens does not fit --pack-tokens {pack_tokens}; "
            f"use --pack-tokens {max(tokens)} or more, or smaller clips (--frames, --height, --width, --max-area)"
        )
    shares, loads = [[] for _ in range(ranks)], [0.0] * ranks
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(ranks), key=lambda r: (loads[r], len(shares[r]), r))
        shares[rank].append(i)
        loads[rank] += costs[i]
    result = [first_fit(tokens, share, pack_tokens) for share in shares]
    most = max(len(packs) for packs in result)
    return [packs + [[] for _ in range(most - len(packs))] for packs in result]


def first_fit(tokens: Sequence[int], share: Sequence[int], pack_tokens: int) -> list[list[int]]:
    """The samples of one rank in packs, by first fit with the longest first."""
    if not pack_tokens:
        return [sorted(share)] if share else []
    packs, room = [], []
    for i in sorted(share, key=lambda i: (-tokens[i], i)):
        fitting = [pack for pack in range(len(packs)) if room[pack] >= tokens[i]]
        if not fitting:
            packs.append([])
            room.append(pack_tokens)
        pack = fitting[0] if fitting else len(packs) - 1
        packs[pack].append(i)
        room[pack] -= tokens[i]
    return [sorted(pack) for pack in packs]
