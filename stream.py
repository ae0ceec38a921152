"""The endless stream of positions, and how a step's samples are divided over ranks and packs.

A sample is named by its position p in one endless stream, and all that is random about it follows from (seed, p,
purpose). Nothing here keeps a state or knows of other processes, so a resumed run needs the step number and no more,
and every rank that needs a number computes the same one: all but measure_cost are pure functions. B: samples of a step
over the whole job.
"""

import hashlib
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import Tensor

# ---- The position stream


@dataclass(frozen=True)
class Draw:
    """What the sample at one position of the stream is made of."""

    position: int
    index: int  # of the item
    variant: int  # which of the item's clips and sizes
    dropped: bool  # whether the empty prompt stands in for its caption
    uniform: float  # in [0, 1), of which the training sigma is made


def generator(seed: int, position: int, purpose: str) -> torch.Generator:
    """The random numbers of one position for one purpose, alike on every rank. On the CPU, since CUDA's generators
    differ between devices; it keeps 32 bits of a seed, so of 100000 positions some two, far apart, may share noise."""
    digest = hashlib.blake2b(f"{seed}/{position}/{purpose}".encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


@lru_cache(maxsize=32)
def permutation(seed: int, epoch: int, n: int, dataset: int = 0) -> Tensor:
    purpose = f"permutation of dataset {dataset}" if dataset else "permutation"
    return torch.randperm(n, generator=generator(seed, epoch, purpose))


def sample_index(seed: int, position: int, n: int, dataset: int = 0) -> int:
    """Which of n samples stands at a position: each once per epoch, in an order of the epoch's own, and no position
    is skipped where an epoch ends within a batch."""
    return int(permutation(seed, position // n, n, dataset)[position % n])


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
    """The B draws of a step: positions step B ... step B + B - 1. `dataset` has a mixture and variants(index)."""
    uniforms = stratified_uniforms(seed, step, batch_size).tolist()
    result = []
    for position, uniform in enumerate(uniforms, step * batch_size):
        index = dataset.mixture.index(seed, position)
        variant = torch.randint(dataset.variants(index), (), generator=generator(seed, position, "variant"))
        chance = torch.rand((), generator=generator(seed, position, "dropout"), dtype=torch.float64)
        result.append(Draw(position, index, int(variant), bool(chance < caption_dropout), uniform))
    return result


# ---- Several datasets

LONGEST_PERIOD = 100_000  # positions after which a mixture's turns repeat; they are kept in a table


@dataclass(frozen=True)
class Mixture:
    """Datasets of `sizes` items each, numbered through from the first one's item 0, and how often each is drawn.

    Without weights an epoch is every item of all of them once. With weights, dataset i gets its share of any stretch
    of positions, give or take one (`take_turns`), and its own draws are a stream with epochs of its own: a small set
    with a large weight comes round more often, and none of its items twice before each has come once.
    """

    sizes: tuple[int, ...]
    weights: tuple[Fraction, ...] = ()

    def __post_init__(self):
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(f"datasets of {self.sizes} items: each needs at least one")
        if self.weights and (len(self.weights) != len(self.sizes) or min(self.weights) <= 0):
            raise ValueError(f"{len(self.sizes)} datasets need as many positive weights, not {spell(self.weights)}")
        if sum(self.counts) > LONGEST_PERIOD:
            raise ValueError(
                f"weights {spell(self.weights)} are met exactly by {sum(self.counts)} positions and no fewer, and "
                f"{LONGEST_PERIOD} is the most: round them"
            )

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The weights as the smallest whole numbers of their ratio."""
        scale = math.lcm(*(w.denominator for w in self.weights))
        whole = [int(w * scale) for w in self.weights]
        return tuple(n // math.gcd(*whole) for n in whole)

    @cached_property
    def turns(self) -> list[tuple[int, int]]:
        """(dataset, its turns before this one) of each position of a period."""
        before = [0] * len(self.counts)
        turns = []
        for dataset in take_turns(self.counts):
            turns.append((dataset, before[dataset]))
            before[dataset] += 1
        return turns

    def index(self, seed: int, position: int) -> int:
        """Which item stands at a position."""
        if not self.weights:
            return sample_index(seed, position, sum(self.sizes))
        period, turn = divmod(position, len(self.turns))
        dataset, before = self.turns[turn]
        drawn = period * self.counts[dataset] + before
        return sum(self.sizes[:dataset]) + sample_index(seed, drawn, self.sizes[dataset], dataset)


def take_turns(counts: Sequence[int]) -> list[int]:
    """Which dataset has each of P = sum(counts) turns, i having counts[i] of them, as evenly as whole turns can be.

    After any n turns, dataset i has had n counts[i] / P of them, and less than one more or less. So turn j of dataset i
    (from 0) begins no earlier than P j / counts[i] and ends no later than P (j + 1) / counts[i], rounded out; of those
    that may begin, the one that must end first goes first, which keeps all within these bounds (Baruah et al. 1996,
    proportionate progress).
    """
    period, had, order = sum(counts), [0] * len(counts), []
    for n in range(period):
        begun = [i for i, count in enumerate(counts) if had[i] * period < (n + 1) * count]
        first = min(begun, key=lambda i: -(-(had[i] + 1) * period // counts[i]))
        had[first] += 1
        order.append(first)
    return order


def split_weights(entries: Sequence[str]) -> tuple[list[str], tuple[Fraction, ...]]:
    """["a.json:3", "b/:0.5"] as paths and weights; without weights those are (). A path that exists as it stands has
    none, whatever follows a colon in it. ValueError where some have weights and others not."""
    paths, weights = [], []
    for entry in entries:
        path, _, number = entry.rpartition(":")
        try:
            weight = Fraction(number) if path and not Path(entry).expanduser().exists() else None
        except (ValueError, ZeroDivisionError):
            weight = None
        paths.append(entry if weight is None else path)
        weights.append(weight)
    given = tuple(w for w in weights if w is not None)
    if given and len(given) < len(paths):
        bare = paths[weights.index(None)]
        raise ValueError(f"--data {bare} has no weight where others have; write {bare}:1, or none at all")
    return paths, given


def spell(weights: Sequence[Fraction]) -> str:
    return ":".join(map(str, weights))


# ---- What a sample costs


@dataclass(frozen=True)
class Cost:
    """The cost of a sample of n tokens in one DiT block, per_token n + per_pair n^2 + per_sample, in any unit: only
    ratios count, and the other costs of a step are in proportion. Plain floats, so that a run can keep them."""

    per_token: float
    per_pair: float
    per_sample: float

    def __call__(self, tokens: int) -> float:
        return float(self.per_token * tokens + self.per_pair * tokens**2 + self.per_sample)


def flops_cost(dim: int, ffn_dim: int, text_len: int = 512) -> Cost:
    """Floating point operations of one block's forward.

    Linear layers take 2 x inputs x outputs per token: q, k, v, o of self-attention, q, o of cross-attention, and the
    two of the feed-forward; k, v of cross-attention run over the text. Attention takes 4 x width x queries x keys.
    """
    linear = 2 * (6 * dim**2 + 2 * dim * ffn_dim)
    return Cost(linear + 4 * dim * text_len, 4 * dim, 2 * text_len * 2 * dim**2)


def sample_cost(tokens: int, dim: int, ffn_dim: int, text_len: int = 512) -> float:
    """Operations of one block's forward on a sample."""
    return flops_cost(dim, ffn_dim, text_len)(tokens)


def trial_packs(longest: int) -> list[list[int]]:
    """Packs (the token counts of their samples) that tell the three terms of a Cost apart: one sample of the longest
    size, half of it, ... an eighth, and eight of the last."""
    eighth = max(1, longest // 8)
    return [[longest], [max(1, longest // 2)], [max(1, longest // 4)], [eighth], [eighth] * 8]


def measure_cost(block_pass: Callable[[list[int]], None], packs: Sequence[list[int]], repeats: int = 3) -> Cost:
    """Times block_pass(pack), one block's forward and backward on a pack, and fits a Cost in seconds to the fastest of
    `repeats` passes each: whatever else the machine does only adds to a time.

    block_pass returns when the device is done. Clocks differ between ranks and from run to run, and the packs
    of a step follow from the costs: measure on one rank, send the result to all, and keep it for the resumed run.
    """
    timings = []
    for pack in packs:
        block_pass(pack)  # the first pass at a size also pays for allocation and the choice of kernels
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            block_pass(pack)
            seconds.append(time.perf_counter() - start)
        timings.append((pack, min(seconds)))
    return fit_cost(timings)


def fit_cost(timings: Sequence[tuple[Sequence[int], float]]) -> Cost:
    """The Cost nearest to measured (token counts of a pack's samples, seconds), by least squares of relative errors.

    No term may be negative, or a long sample could cost less than a short one: of all choices of terms to leave out,
    the best whose remaining ones are positive. Raises ValueError for timings that cannot tell the terms apart.
    """
    rows = [[sum(pack), sum(n**2 for n in pack), len(pack)] for pack, _ in timings]
    seconds = torch.tensor([s for _, s in timings], dtype=torch.float64)
    matrix = torch.tensor(rows, dtype=torch.float64) / seconds[:, None]  # each row times the terms should be 1
    scale = matrix.norm(dim=0)
    matrix = matrix / scale
    if len(rows) < 3 or torch.linalg.matrix_rank(matrix) < 3:
        raise ValueError(f"{len(rows)} timings of packs do not tell apart what a token, a pair and a sample cost")
    best, least = None, math.inf
    for kept in itertools.product([False, True], repeat=3):
        terms = torch.zeros(3, dtype=torch.float64)
        kept = torch.tensor(kept)
        if kept.any():
            terms[kept] = torch.linalg.lstsq(matrix[:, kept], torch.ones(len(rows), 1, dtype=torch.float64)).solution[
                :, 0
            ]
        error = float((matrix @ terms - 1).norm())
        if terms.min() >= 0 and error < least:
            best, least = terms, error
    return Cost(*(best / scale).tolist())


# ---- Packs


def assign_packs(tokens: Sequence[int], costs: Sequence[float], ranks: int, pack_tokens: int) -> list[list[list[int]]]:
    """Which rank computes which samples of a step, and in which packs: result[rank][pack] is a list of sample numbers.

    Samples go, costliest first, to the rank with the least cost so far, which leaves the ranks within one sample's
    cost of each other; `exchange` then evens out what it can. A rank's samples fill packs of at most `pack_tokens` (0:
    one pack), longest first, each into the first pack with room, and its packs run costliest first, so that ranks
    which meet at every pack meet at packs of like cost. All ranks get as many packs as the one with most, the rest
    being empty, since a pack's collectives need every rank. Raises ValueError for a sample that fits no pack.
    """
    check_fits(max(tokens), pack_tokens)
    shares, loads = [[] for _ in range(ranks)], [0.0] * ranks
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(ranks), key=lambda r: (loads[r], len(shares[r]), r))
        shares[rank].append(i)
        loads[rank] += costs[i]
    exchange(shares, loads, costs)
    result = [first_fit(tokens, share, pack_tokens) for share in shares]
    result = [sorted(packs, key=lambda pack: -sum(costs[i] for i in pack)) for packs in result]
    most = max(len(packs) for packs in result)
    return [packs + [[] for _ in range(most - len(packs))] for packs in result]


def check_fits(longest: int, pack_tokens: int, sp: int = 1) -> None:
    """ValueError if a sample of `longest` tokens, which `sp` ranks share, fits no pack of `pack_tokens` on each."""
    if pack_tokens and longest > pack_tokens * sp:
        shared = f", which {sp} ranks share," * (sp > 1)
        raise ValueError(
            f"a sample of {longest} tokens{shared} does not fit --pack-tokens {pack_tokens}; use --pack-tokens "
            f"{-(-longest // sp)} or more, or smaller clips (--frames, --height, --width, --max-area)"
        )


def exchange(shares: list[list[int]], loads: list[float], costs: Sequence[float]) -> None:
    """Lowers the largest load, in place, while that can be done by giving one of its samples to another rank or by
    changing it for a cheaper one there; each time by what leaves the two ranks' larger load least."""
    while True:
        top = max(range(len(loads)), key=lambda rank: (loads[rank], -rank))
        best = loads[top] * (1 - 1e-9), None  # less than rounding is no gain
        for rank in range(len(loads)):
            for i, j in itertools.product(shares[top], [None, *shares[rank]]) if rank != top else ():
                moved = costs[i] - (0.0 if j is None else costs[j])
                larger = max(loads[top] - moved, loads[rank] + moved)
                if larger < best[0]:
                    best = larger, (rank, i, j, moved)
        if best[1] is None:
            return
        rank, i, j, moved = best[1]
        shares[top].remove(i)
        shares[rank].append(i)
        if j is not None:
            shares[rank].remove(j)
            shares[top].append(j)
        loads[top] -= moved
        loads[rank] += moved


def loads_of(assigned: list[list[list[int]]], costs: Sequence[float]) -> list[float]:
    """Each rank's cost, with `assigned` from `assign_packs`."""
    return [sum(costs[i] for pack in packs for i in pack) for packs in assigned]


def idle_share(loads: Sequence[Sequence[float]]) -> float:
    """The share of all ranks' time in which they wait for the most loaded one. loads: of each rank in each part of a
    step, parts being what all ranks end together (a model with two experts has two)."""
    busiest = sum(map(max, loads))
    return 1 - sum(map(sum, loads)) / (len(loads[0]) * busiest) if busiest else 0.0


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
