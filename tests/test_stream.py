"""The position stream, mixtures of datasets, what samples cost, and their division over ranks and packs."""

import random
import shutil
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
import runs
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import train
from batch import block_pass
from model import CONFIGS, WanConfig, WanDiT
from stream import (
    Cost,
    Mixture,
    assign_packs,
    draws,
    exchange,
    fit_cost,
    flops_cost,
    generator,
    idle_share,
    loads_of,
    measure_cost,
    permutation,
    sample_cost,
    sample_index,
    split_weights,
    stratified_uniforms,
    trial_packs,
)

# ---- The position stream


class Toy:
    """As much of a dataset as draws() asks for."""

    def __init__(self, *sizes, weights=()):
        self.mixture = Mixture(sizes, tuple(map(Fraction, weights)))

    def variants(self, index):
        return 1 + index % 3


@pytest.mark.parametrize("batch_size", [1, 3, 7, 20])
def test_stream(batch_size):
    """Each epoch holds every sample once in an order of its own, whatever the batch; nothing is dropped at its end."""
    n, seed = 10, 5
    stream = [d for step in range(120 // batch_size) for d in draws(step, batch_size, seed, Toy(n))]
    assert [d.position for d in stream] == list(range(len(stream)))
    epochs = [tuple(d.index for d in stream[i : i + n]) for i in range(0, len(stream) - n + 1, n)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs) and len(set(epochs)) == len(epochs)
    assert [d.index for d in stream] == [sample_index(seed, p, n) for p in range(len(stream))]


def test_draws():
    """Variants stay in range and all occur, dropout has its rate, both belong to the position and not to the batch, and
    a step's uniforms fill all strata."""
    small = [d for step in range(500) for d in draws(step, 2, 1, Toy(9), 0.25)]
    large = [d for step in range(10) for d in draws(step, 100, 1, Toy(9), 0.25)]
    parts = [[(d.index, d.variant, d.dropped) for d in ds] for ds in (small, large)]
    assert parts[0] == parts[1]
    assert {(d.index % 3, d.variant) for d in small} == {(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)}
    assert 0.2 < sum(d.dropped for d in small) / 1000 < 0.3
    assert not any(d.dropped for d in draws(0, 500, 1, Toy(9), 0.0))
    assert all(d.dropped for d in draws(0, 500, 1, Toy(9), 1.0))
    for step in (0, 7):
        uniforms = stratified_uniforms(1, step, 64)
        assert uniforms.dtype == torch.float64
        assert sorted((uniforms * 64).int().tolist()) == list(range(64))
        assert (uniforms * 64).int().tolist() != list(range(64))
    assert (stratified_uniforms(1, 0, 64) != stratified_uniforms(2, 0, 64)).all()
    # each position on its own is uniform: no stratum is its regular place
    first = torch.stack([stratified_uniforms(3, step, 4)[0] for step in range(400)])
    assert abs(first.mean() - 0.5) < 0.05 and abs(first.std() - 12**-0.5) < 0.03


def test_generator_is_stable():
    """A resumed run has to find the noise of the old one: these numbers must never change."""
    seed = 2469732077  # the first four bytes of blake2b("42/1000/noise", digest_size=4), little-endian
    values = torch.rand(2, generator=generator(42, 1000, "noise"), dtype=torch.float64)
    assert generator(42, 1000, "noise").initial_seed() == seed
    assert values.tolist() == [0.5023485698776473, 0.8545471455482428]
    others = [generator(*key).initial_seed() for key in [(43, 1000, "noise"), (42, 1001, "noise"), (42, 1000, "a")]]
    assert len({seed, *others}) == 4
    assert generator(1, 12, "x").initial_seed() != generator(11, 2, "x").initial_seed()


@pytest.mark.parametrize("batch_size", [1, 5, 8, 64])
@pytest.mark.parametrize("dp", [1, 2, 3, 8])
@pytest.mark.parametrize("pack_tokens", [0, 45, 200])
def test_an_epoch_under_any_layout(batch_size, dp, pack_tokens):
    """However a step is divided over ranks and packs, the samples that all ranks compute are the epoch's, each once:
    the promise that no layout drops, repeats or pads."""
    dataset, steps = Toy(13, 10), -(-46 // batch_size)  # two epochs of 23
    seen = {}
    for step in range(steps):
        drawn = draws(step, batch_size, 3, dataset)
        tokens = [1 + (d.index * 7 + d.variant) % 45 for d in drawn]
        shares = assign_packs(tokens, [sample_cost(n, 8, 16, 4) for n in tokens], dp, pack_tokens)
        for i in (i for packs in shares for pack in packs for i in pack):
            assert drawn[i].position not in seen
            seen[drawn[i].position] = drawn[i].index
    assert sorted(seen) == list(range(steps * batch_size))
    for epoch in (0, 1):
        assert sorted(seen[p] for p in range(23 * epoch, 23 * (epoch + 1))) == list(range(23))


# ---- Several datasets


def test_mixture_is_even():
    """After any number of draws every dataset has had its share to within one sample, for any number of datasets and
    any weights: no stretch of a run trains on another ratio than the one asked for."""
    rng = random.Random(0)
    for _ in range(60):
        k = rng.randint(1, 7)
        mixture = Mixture((50,) * k, tuple(Fraction(rng.randint(1, 400), rng.choice([1, 10, 100])) for _ in range(k)))
        had, counts, period = [0] * k, mixture.counts, len(mixture.turns)
        assert [Fraction(n, counts[0]) for n in counts] == [w / mixture.weights[0] for w in mixture.weights]
        for n in range(1, min(2 * period + 2, 1000)):
            had[mixture.index(1, n - 1) // 50] += 1
            assert all(abs(h * period - n * count) < period for h, count in zip(had, counts, strict=True)), counts


def test_mixture_streams():
    """A weighted dataset's own draws hold each of its items once per epoch of its own, from one end of the run to the
    other, and datasets of one size do not go through their items in step."""
    mixture = Mixture((5, 5, 7), (Fraction("0.5"), Fraction("0.5"), Fraction(2)))
    assert mixture.counts == (1, 1, 4)
    order = [mixture.index(9, p) for p in range(700)]
    assert order == [mixture.index(9, p) for p in reversed(range(700))][::-1]  # no state
    streams = [[i - first for i in order if first <= i < first + n] for first, n in ((0, 5), (5, 5), (10, 7))]
    for stream, n in zip(streams, (5, 5, 7), strict=True):
        epochs = [stream[i : i + n] for i in range(0, len(stream) - n + 1, n)]
        assert len(epochs) > 10 and all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert streams[0][:100] != streams[1][:100]
    assert [d.index for d in draws(0, 700, 9, Toy(5, 5, 7, weights=("0.5", "0.5", "2")))] == order


def test_mixture_known():
    """Without weights, datasets are one: the order is that of their items together. With them, turns are as told."""
    assert [Mixture((4, 6)).index(3, p) for p in range(50)] == [sample_index(3, p, 10) for p in range(50)]
    assert [i for i, _ in Mixture((9, 9), (Fraction(3), Fraction(1))).turns] == [0, 0, 0, 1]
    assert [i for i, _ in Mixture((9, 9, 9), (Fraction(1), Fraction(2), Fraction(1))).turns] == [1, 0, 1, 2]
    assert not torch.equal(permutation(0, 0, 50), permutation(0, 0, 50, 1))
    for sizes, weights, message in [
        ((3, 0), (), r"each needs at least one"),
        ((3, 3), (1,), "2 datasets need as many positive weights, not 1"),
        ((3, 3), (1, 0), "positive weights, not 1:0"),
        ((3, 3), ("0.333333", "0.5"), "by 833333 positions and no fewer, and 100000 is the most"),
    ]:
        with pytest.raises(ValueError, match=message):
            Mixture(sizes, tuple(map(Fraction, weights)))


def test_split_weights(tmp_path, monkeypatch):
    """--data entries as users write them: what follows a colon is a weight only if it is a number and no such file
    exists, and half a set of weights is an error and not a guess."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd:2").mkdir()
    assert split_weights(["a.json:3", "b/:0.5"]) == (["a.json", "b/"], (Fraction(3), Fraction(1, 2)))
    assert split_weights(["a.json", "C:/b"]) == (["a.json", "C:/b"], ())
    assert split_weights(["odd:2"]) == (["odd:2"], ()) and split_weights(["odd:2:1"]) == (["odd:2"], (1,))
    assert split_weights([]) == ([], ())
    with pytest.raises(ValueError, match="--data b has no weight where others have; write b:1, or none"):
        split_weights(["a:2", "b"])


# ---- Packs


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("pack_tokens", [0, 400, 1000])
def test_packs(ranks, pack_tokens):
    """Every sample is computed once, no pack overflows, ranks have equally many packs (or their collectives would not
    meet), and their costs differ by less than one sample's."""
    for seed in range(20):
        rng = torch.Generator().manual_seed(seed)
        tokens = torch.randint(1, 400, (int(torch.randint(1, 30, (), generator=rng)),), generator=rng).tolist()
        costs = [sample_cost(t, 128, 512, 32) for t in tokens]
        packs = assign_packs(tokens, costs, ranks, pack_tokens)
        assert packs == assign_packs(tokens, costs, ranks, pack_tokens) and len(packs) == ranks
        assert sorted(i for share in packs for pack in share for i in pack) == list(range(len(tokens)))
        assert len({len(share) for share in packs}) == 1
        assert not pack_tokens or max(sum(tokens[i] for i in pack) for share in packs for pack in share) <= pack_tokens
        loads = [sum(costs[i] for pack in share for i in pack) for share in packs]
        assert max(loads) - min(loads) <= max(costs) * (1 + 1e-9)
        if pack_tokens:  # first fit leaves at most one pack of a rank half empty
            for share in packs:
                halves = sorted(sum(tokens[i] for i in pack) for pack in share if pack)
                assert all(half > pack_tokens / 2 for half in halves[1:])


def test_packs_known():
    """Cost and not number decides: one long sample weighs as much as four short ones. Equal costs keep their order; the
    costliest and the longest are placed first, which is what makes shares even and packs few."""
    assert assign_packs([40, 10, 10, 10, 10], [4, 1, 1, 1, 1], 2, 0) == [[[0]], [[1, 2, 3, 4]]]
    assert assign_packs([10, 10, 10, 10, 40], [1, 1, 1, 1, 4], 2, 0) == [[[4]], [[0, 1, 2, 3]]]
    assert assign_packs([3, 3, 7, 7], [1, 1, 1, 1], 1, 10) == [[[0, 2], [1, 3]]]
    assert assign_packs([5, 5, 5, 5], [1, 1, 1, 1], 2, 5) == [[[0], [2]], [[1], [3]]]
    assert assign_packs([5], [1], 3, 5) == [[[0]], [[]], [[]]]
    with pytest.raises(ValueError, match="a sample of 41 tokens does not fit --pack-tokens 40; use --pack-tokens 41"):
        assign_packs([40, 41], [1, 1], 2, 40)


def test_sample_cost():
    """The cost is the count of operations of one block of the real model, so packs are balanced by what they take."""
    config = CONFIGS["demo"]

    def operations(layers):
        model = WanDiT(replace(config, num_layers=layers))
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model([torch.randn(16, 3, 8, 10)], [500.0], [torch.randn(5, config.text_dim)])  # 3 x 4 x 5 tokens
        return counter.get_total_flops()

    assert operations(2) - operations(1) == sample_cost(60, config.dim, config.ffn_dim, config.text_len)


def test_weights_reach_the_stream(tmp_path, monkeypatch):
    """The datasets of --data and their weights are the run's: a folder of one image with weight 3 gives three of four
    samples, and the other's four files come in turn."""
    monkeypatch.chdir(tmp_path)  # and back afterwards: runs changes it
    runs.prepare(tmp_path)
    (tmp_path / "more").mkdir()
    for file in ("c.png", "c.txt"):
        shutil.copy(tmp_path / "data" / file, tmp_path / "more" / file)
    monkeypatch.setattr(train, "fit", lambda config, layout, dataset, *rest: dataset)  # what main would train on
    with pytest.raises(ValueError, match="data has no weight where others have"):
        train.main(runs.config(tmp_path, data=(f"{tmp_path}/data", f"{tmp_path}/more:3")))
    dataset = train.main(runs.config(tmp_path, data=(f"{tmp_path}/data:1", f"{tmp_path}/more:3")))
    assert dataset.mixture == Mixture((4, 1), (Fraction(1), Fraction(3)))
    drawn = [d.index for d in draws(0, 16, 0, dataset)]
    assert sorted(drawn) == [0, 1, 2, 3] + [4] * 12 and dataset.items[4].path.parent.name == "more"
    assert dataset.shape(4, 0) == dataset.sample(4, 0)["latents"].shape == dataset.shape(2, 0)


# ---- Balance


def mixed(steps, batch_size):
    """Costs of each step's samples for the 1.3B model: half images, half videos of 17, 49 and 81 frames, 480x832."""
    frames = [1] * 500 + [(5, 13, 21)[i % 3] for i in range(500)]
    cost, dataset = flops_cost(1536, 8960), Toy(1000)
    for step in range(steps):
        tokens = [1560 * frames[d.index] for d in draws(step, batch_size, 0, dataset)]
        yield tokens, [cost(n) for n in tokens]


@pytest.mark.parametrize("batch_size, dp", [(32, 4), (64, 4), (64, 8)])
def test_mixed_batches_are_balanced(batch_size, dp):
    """On images and videos of three lengths the most loaded rank has 1.1 of the mean, over many steps, where the same
    number of samples for every rank gives it 1.3 and more: ranks would wait for each other."""
    ours, dealt = [], []
    for tokens, costs in mixed(60, batch_size):
        mean, each = sum(costs) / dp, batch_size // dp
        ours.append(max(loads_of(assign_packs(tokens, costs, dp, 0), costs)) / mean)
        dealt.append(max(sum(costs[r * each : (r + 1) * each]) for r in range(dp)) / mean)
    assert sum(ours) / 60 < 1.03 and sum(x > 1.1 for x in ours) <= 1
    assert sum(dealt) / 60 > 1.3


def test_no_rank_has_more_than_the_costliest_sample():
    """With four samples per rank a sample may cost more than a rank's mean: the most loaded rank then has that sample
    alone, which no assignment betters."""
    alone = 0
    for tokens, costs in mixed(60, 32):
        if max(costs) > sum(costs) / 8 and costs.count(max(costs)) <= 8:
            alone += 1
            assert max(loads_of(assign_packs(tokens, costs, 8, 0), costs)) == max(costs)
    assert alone > 10


def test_exchange():
    """Where costliest-first leaves ranks uneven, moving or changing samples evens them out; loads are kept right."""
    shares, costs = [[0, 3, 4], [1, 2]], [3.0, 3.0, 2.0, 2.0, 2.0]
    loads = [7.0, 5.0]
    exchange(shares, loads, costs)
    assert loads == [6.0, 6.0] and sorted(map(sorted, shares)) == [[0, 1], [2, 3, 4]]
    shares, loads = [[0, 1, 2], []], [3.0, 0.0]
    exchange(shares, loads, [1.0, 1.0, 1.0])
    assert loads == [2.0, 1.0] and sorted(map(len, shares)) == [1, 2]
    rng = random.Random(0)
    for _ in range(100):
        tokens = [rng.randint(11000, 13824) if rng.random() < 0.7 else rng.randint(1000, 8000) for _ in range(32)]
        costs = [sample_cost(n, 1536, 8960) for n in tokens]
        assert max(loads_of(assign_packs(tokens, costs, 8, 0), costs)) < 1.1 * sum(costs) / 8


def test_packs_run_costliest_first():
    """Ranks meet at every pack of a sharded model, so packs of like cost must have the same number on each."""
    for tokens, costs in mixed(20, 64):
        for packs in assign_packs(tokens, costs, 4, 33000):
            each = [sum(costs[i] for i in pack) for pack in packs]
            assert each == sorted(each, reverse=True)


def test_idle_share():
    """The figure in the metrics: the part of all ranks' time that is waiting."""
    assert idle_share([[4.0, 4.0]]) == 0 and idle_share([[4.0, 2.0, 0.0]]) == 0.5 and idle_share([[0.0]]) == 0
    assert idle_share([[4.0, 2.0], [1.0, 3.0]]) == 1 - 10 / 14  # two parts, each as long as its most loaded rank


# ---- Measured costs


def test_fit_cost():
    """The fit finds the terms that made the timings, to their noise, gives no term a negative sign, and refuses timings
    that do not tell the terms apart."""
    true = Cost(2e-6, 3e-11, 4e-4)
    packs = trial_packs(32760)
    exact = fit_cost([(pack, sum(map(true, pack))) for pack in packs])
    assert all(abs(a / b - 1) < 1e-6 for a, b in zip(vars(exact).values(), vars(true).values(), strict=True))
    rng = random.Random(0)
    noisy = [(pack, sum(map(true, pack)) * rng.uniform(0.97, 1.03)) for pack in packs for _ in range(5)]
    assert all(abs(fit_cost(noisy)(n) / true(n) - 1) < 0.05 for n in (1560, 7800, 20280, 32760))
    less = fit_cost([(pack, sum(n - 1e-6 * n**2 for n in pack)) for pack in trial_packs(4000)])
    assert min(vars(less).values()) == 0 and less.per_token > 0
    assert all(type(value) is float for value in vars(exact).values())
    for timings in ([([10], 1.0), ([20], 2.0)], [([10], 1.0)] * 9, [([10] * n, 1.0 * n) for n in (1, 2, 3, 4)]):
        with pytest.raises(ValueError, match="do not tell apart"):
            fit_cost(timings)


def test_measure_cost():
    """Measured on what takes time per token, per pair and per sample, the model ranks samples as the clock does: the
    fastest of several passes, after one that warms up."""
    clock, passes = [0.0], Counter()

    def block_pass(pack):
        passes[len(pack), pack[0]] += 1
        slow = 10 if passes[len(pack), pack[0]] in (1, 3) else 1  # the warm-up, and one pass that was disturbed
        clock[0] += slow * sum(1e-3 * n + 1e-6 * n**2 + 0.01 for n in pack)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stream.time.perf_counter", lambda: clock[0])
        cost = measure_cost(block_pass, trial_packs(4000))
    assert set(passes.values()) == {4}
    assert abs(cost(1000) - 2.01) < 1e-6 and abs(cost(4000) - 20.01) < 1e-6


def test_a_block_can_be_measured():
    """The pass that is timed is a block's own, on packs of one sample and of several, for every kind of model."""
    for model_type in ("t2v", "i2v"):
        run = block_pass(WanConfig(model_type, dim=48, ffn_dim=64, num_heads=4), torch.device("cpu"), torch.float32)
        cost = measure_cost(run, trial_packs(64), repeats=1)
        assert all(value >= 0 for value in vars(cost).values()) and cost(64) > 0
