"""Faults that sequence- and data-parallel trainers really had, planted one at a time in picowan's own training run.

Each has the section of the catalogue it stands for (A collectives without their adjoint, B reduction groups, C loss
denominators, D data, E positions, F lengths and padding, G all-to-all layout, H ring, I parameters outside the
wrapper, J clipping and optimizer, K accumulation, L initialisation, N recomputation, O batches), the layout it runs
on, and the place that parity.diff must name.
"""

import dataclasses
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
import torch.distributed as dist

import batch
import flow
import model
import parallel
import parity
import resume
import stream
import train
from parallel import AllToAll, RingAttention, SequenceParallel

ULYSSES = {"ulysses": 2}
RING = {"ring": 2}
BOTH = {"ulysses": 2, "ring": 2}
DDP = {"ulysses": 1}


@dataclass
class Fault:
    name: str
    plant: object  # () -> a context manager
    place: str  # regular expression for Verdict.place
    layout: dict = field(default_factory=lambda: dict(ULYSSES))  # options of the run, on 4 processes
    factor: float | None = None  # that Verdict.factor must be
    steps: int = 1
    of_layout: bool = True  # whether one process is free of it, so that --verify-layout can see it in the first step
    stops: tuple = ()
    even: bool = False  # run on samples of one size: where ranks disagree on sizes, they hang or stop with an error


FAULTS: list[Fault] = []


def fault(place: str, **how):
    """Register a function () -> context manager as a fault; its docstring says what it is."""

    def register(plant):
        FAULTS.append(Fault(plant.__name__, plant, place, **how))
        return plant

    return register


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """Processes of the run under way, which may be that of one process inside a group of four."""
    return NOW[0]


NOW = [1]


def rehearse(fit, config, layout, *rest):
    """parity.rehearse, with the layout noted for the faults that one process is free of."""
    NOW[0] = layout.world
    return ORIGINAL["rehearse"](fit, config, layout, *rest)


def static(owner, name, function):
    return patch.object(owner, name, staticmethod(function))


ORIGINAL = {
    name: getattr(owner, name)
    for owner, names in {
        SequenceParallel: ["attention", "shard"],
        RingAttention: ["backward"],
        parallel: [
            "sum_gradients",
            "travel",
            "merge",
            "flash_forward",
            "flash_backward",
            "clip_gradients",
            "parallelize",
        ],
        stream: ["generator", "permutation", "sample_index", "stratified_uniforms", "draws", "assign_packs"],
        flow: ["add_noise", "velocity_target", "flow_loss"],
        batch: ["pack_loss", "make_pack", "step_packs"],
        train: ["make_optimizer", "learning_rate"],
        model: ["rotary_table", "attend_each"],
        resume: ["load"],
        parity: ["rehearse"],
    }.items()
    for name in names
}
SELF_ATTENTION_BACKWARD = r"blocks\.\d+: backward of self-attention"


# -- A. Collectives with no autograd, or the wrong one


@fault(SELF_ATTENTION_BACKWARD, factor=0.0)
def inputs_of_attention_detached():
    """A5: q, k, v lose their history on the way into the all-to-all."""

    def faulty(self, q, k, v, lengths):
        q, k, v = (x.detach() + 0 * x for x in (q, k, v))
        return ORIGINAL["attention"](self, q, k, v, lengths)

    return patch.object(SequenceParallel, "attention", faulty)


@fault(SELF_ATTENTION_BACKWARD, layout=RING | {"shard": "full"})
def ring_without_autograd():
    """A2: inference code lifted into a trainer: the attention's output has no history."""

    def faulty(self, q, k, v, lengths):
        return ORIGINAL["attention"](self, q, k, v, lengths).detach()

    return patch.object(SequenceParallel, "attention", faulty)


@fault(SELF_ATTENTION_BACKWARD)
def all_to_all_backward_is_identity():
    """A10: the gradient is not sent back to where its tokens came from."""
    return static(AllToAll, "backward", lambda ctx, grad: (grad, None))


@fault(SELF_ATTENTION_BACKWARD)
def all_to_all_backward_keeps_own():
    """A8: only the slice that stayed at home gets its gradient."""

    def faulty(ctx, grad):
        out, me = torch.zeros_like(grad), dist.get_rank(ctx.group)
        out[me] = grad[me]
        return out, None

    return static(AllToAll, "backward", faulty)


@fault(SELF_ATTENTION_BACKWARD, factor=2.0)
def all_to_all_backward_scaled():
    """A7: the upstream gradients are multiplied by the group's size."""
    right = AllToAll.backward
    return static(AllToAll, "backward", lambda ctx, grad: (right(ctx, grad)[0] * 2**0.5, None))


# -- B. Reduction group and scale


def reducing(change, group=None):
    """DDP's hook with another reduction."""

    def faulty(_, bucket) -> torch.futures.Future[torch.Tensor]:
        return change(bucket)

    return patch.object(parallel, "sum_gradients", faulty)


def done(tensor) -> torch.futures.Future:
    future = torch.futures.Future()
    future.set_result(tensor)
    return future


def scaled(factor):
    def change(bucket):
        dist.all_reduce(bucket.buffer())
        return done(bucket.buffer().mul_(factor))

    return reducing(change)


@fault("gradient reduction", factor=0.25)
def gradients_averaged_over_the_world():
    """B1: a framework's default mean."""
    return scaled(0.25)


@fault("gradient reduction", factor=0.5)
def gradients_averaged_over_sp():
    """B6: the divisor is the sequence-parallel size."""
    return scaled(0.5)


@fault("gradient reduction", factor=2.0, layout=RING)
def gradients_times_sp():
    """B4: a factor that nothing cancels."""
    return scaled(2.0)


@fault("gradient reduction", layout=BOTH | {"shard": "full"}, factor=0.25)
def fsdp_averages():
    """B16: FSDP2 without its divide factor set."""
    return patch("torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor", lambda self, factor: None)


def within(ranks):
    """A reduction over part of the world only."""
    groups = {}

    def change(bucket):
        if not groups:
            for part in ranks:
                groups.update(dict.fromkeys(part, None))
        for part in ranks:
            group = GROUPS.setdefault(tuple(part), None) or dist.new_group(list(part))
            GROUPS[tuple(part)] = group
        mine = next(part for part in ranks if rank() in part)
        dist.all_reduce(bucket.buffer(), group=GROUPS[tuple(mine)])
        return done(bucket.buffer())

    return reducing(change)


GROUPS: dict = {}


@fault("gradient reduction")
def gradients_reduced_over_dp_only():
    """B5: DDP built with the data-parallel group."""
    return within([(0, 2), (1, 3)])


@fault("gradient reduction")
def gradients_reduced_over_sp_only():
    """B15: replicas drift apart."""
    return within([(0, 1), (2, 3)])


@fault("gradient reduction")
def gradients_not_reduced():
    """B14: a reduction over a group of one."""
    return reducing(lambda bucket: done(bucket.buffer()))


def unreduced(pattern: str):
    """Some parameters are left out of the wrapper's reduction."""

    def faulty(module, *args):
        names = [n for n, _ in module.named_parameters() if any(p in n for p in pattern.split("|"))]
        module._ddp_params_and_buffers_to_ignore = names
        return ORIGINAL["parallelize"](module, *args)

    return patch.object(parallel, "parallelize", faulty)


@fault("gradient reduction")
def text_not_reduced():
    """B13: the text projection is in no bucket."""
    return unreduced("text_embedding")


@fault("gradient reduction")
def qk_norm_not_reduced():
    """I6: norm weights are reduced only under another flag."""
    return unreduced("norm_q|norm_k")


@fault("gradient reduction", layout=DDP)
def late_parameters_not_reduced():
    """I1: parameters that were added after the wrapping."""
    return unreduced("modulation")


@fault("gradient reduction")
def only_attention_reduced():
    """B11: dK and dV are exchanged, all other gradients are not."""
    return unreduced("ffn|embedding|cross|head|time|modulation|norm")


@fault("gradient reduction")
def gradients_reduced_in_bf16():
    """J7: the reduction's dtype."""

    def change(bucket):
        narrow = bucket.buffer().to(torch.bfloat16)
        dist.all_reduce(narrow)
        bucket.buffer().copy_(narrow)
        return done(bucket.buffer())

    return reducing(change)


# -- C. Loss denominators


def loss_scaled(factor):
    return patch.object(batch, "pack_loss", lambda *args: ORIGINAL["pack_loss"](*args) * factor())


@fault("^loss", factor=2.0)
def loss_counts_dp_tokens_only():
    """C1: the denominator is reduced over the data-parallel ranks only: times sp."""
    return loss_scaled(lambda: 2.0 if world() > 1 else 1.0)


@fault("^loss", factor=0.5)
def loss_divided_by_sp():
    """B2: the factor that cancels an averaging is dropped."""
    return loss_scaled(lambda: 0.5 if world() > 1 else 1.0)


@fault("^loss")
def mean_over_local_tokens():
    """C2: each rank takes the mean over its own tokens, and the ranks' means are averaged."""

    def faulty(prediction, target, weights):
        if world() == 1:
            return ORIGINAL["flow_loss"](prediction, target, weights)
        used = weights > 0
        return (prediction - target)[used].square().mean() / world() if used.any() else (prediction * 0).sum()

    return patch.object(flow, "flow_loss", faulty)


@fault("^loss")
def padding_in_loss():
    """C5: padding tokens count."""

    def faulty(prediction, target, weights):
        weights = torch.where(weights == 0, weights.max(), weights) if world() > 1 else weights
        return ORIGINAL["flow_loss"](prediction, target, weights)

    return patch.object(flow, "flow_loss", faulty)


@fault("reported loss")
def only_the_printed_loss_is_local():
    """C6: the curve is wrong, the training is not."""
    return patch.object(parallel.Layout, "sum", lambda self, x: x)


@fault("data: weights", layout=DDP)
def mean_over_the_packs_own_samples():
    """C2: samples are averaged per pack and not over the global batch."""

    def faulty(drawn, sigmas, config, dataset):
        pack = ORIGINAL["make_pack"](drawn, sigmas, config, dataset)
        share = config.batch_size / max(1, len(drawn)) / world()
        pack.weights = [w * share * (1 if world() == 1 else 1.0001) for w in pack.weights]
        return pack

    return patch.object(batch, "make_pack", faulty)


# -- D. Who gets which sample, noise, timestep


def generator_with(key):
    """stream.generator with (seed, position) changed by key(seed, position, purpose)."""
    return patch.object(stream, "generator", lambda s, p, what: ORIGINAL["generator"](*key(s, p, what), what))


@fault("data: noise")
def noise_per_rank():
    """D1: noise is drawn on every rank for itself."""
    return generator_with(lambda s, p, what: (s + 1000 * rank() * (what == "noise"), p))


@fault("data: (noise|timesteps|text|latents|weights)", layout=RING)
def everything_per_rank():
    """D1: every draw about a sample depends on the rank."""
    return generator_with(lambda s, p, what: (s + 1000 * rank() * (what not in ("permutation",)), p))


@fault("data: timesteps", layout=RING)
def timestep_per_rank():
    """D1: the timestep is drawn on every rank for itself."""
    return generator_with(lambda s, p, what: (s + 1000 * rank() * (what == "uniform"), p))


@fault("data: text")
def caption_dropout_per_rank():
    """N6: ranks drop different captions."""
    return generator_with(lambda s, p, what: (s + rank() * (what == "dropout"), p))


def order_per_rank():
    return patch.object(stream, "permutation", lambda seed, *args: ORIGINAL["permutation"](seed + rank(), *args))


@fault("data: (positions|samples|latents)", even=True)
def data_per_rank():
    """D2: ranks of a sequence-parallel group read different samples."""
    return order_per_rank()


@fault("data: (samples|latents)", layout=DDP, even=True)
def permutation_per_dp_rank():
    """D5: data-parallel ranks slice different permutations: samples are shared, others never seen."""
    return order_per_rank()


@fault("data: noise", layout=DDP)
def one_noise_for_all():
    """D7: every sample draws from the same seed."""
    return generator_with(lambda s, p, what: (s, 0 if what == "noise" and world() > 1 else p))


@fault("data: positions", even=True)
def dp_rank_modulo():
    """D3: rank % dp in place of rank // sp."""
    return patch.object(parallel.Layout, "dp_rank", property(lambda self: self.rank % self.dp))


@fault("data: positions", layout=DDP)
def samples_padded_with_repeats():
    """D12: the last rank repeats another's samples instead of its own."""

    def faulty(*args):
        parts = ORIGINAL["assign_packs"](*args)
        return [*parts[:-1], parts[0]] if len(parts) > 1 else parts

    return patch.object(stream, "assign_packs", faulty)


@fault("data: positions", layout=DDP | {"pack_tokens": 45, "batch_size": 8})
def sharded_twice():
    """D6: each rank sees a share of its share."""

    def faulty(*args):
        parts = ORIGINAL["assign_packs"](*args)
        return [[pack[::2] for pack in part] for part in parts] if len(parts) > 1 else parts

    return patch.object(stream, "assign_packs", faulty)


@fault("data: samples", steps=3, of_layout=False)
def same_order_every_epoch():
    """D11: the epoch is never set: seen in the second one."""
    return patch.object(stream, "permutation", lambda seed, epoch, *args: ORIGINAL["permutation"](seed, 0, *args))


@fault("data: noised latents", layout=DDP, of_layout=False)
def one_sigma_per_pack():
    """O2: the first sample's sigma is broadcast over the batch."""
    return patch.object(flow, "add_noise", lambda x, noise, sigma: ORIGINAL["add_noise"](x, noise, 0.5))


@fault("data: target", of_layout=False)
def target_sign():
    """The velocity points the other way."""
    return patch.object(flow, "velocity_target", lambda x, noise: x - noise)


@fault("data: positions", layout=DDP | {"pack_tokens": 45, "batch_size": 8})
def one_rank_skips_its_last_pack():
    """K3: a pack is skipped on a local condition."""

    def faulty(config, dataset, layout, step, cost):
        now = ORIGINAL["step_packs"](config, dataset, layout, step, cost)
        if layout.rank == 1:
            now.packs[""][-1] = ORIGINAL["make_pack"]([], [], config, dataset)
        return now

    return patch.object(batch, "step_packs", faulty)


# -- E. Positions


def is_table(x) -> bool:
    return x.ndim == 2 and x.shape[1] == 6


@fault("rotary table")
def rotary_restarts():
    """E1: every rank counts its tokens from 0."""

    def faulty(self, x):
        return x[: len(ORIGINAL["shard"](self, x))] if is_table(x) else ORIGINAL["shard"](self, x)

    return patch.object(SequenceParallel, "shard", faulty)


@fault("rotary table", layout=RING)
def rotary_of_the_next_rank():
    """E3: the slice's number comes from the wrong rank."""

    def faulty(self, x):
        right = ORIGINAL["shard"](self, x)
        return x[-len(right) :] if is_table(x) and self.layout.sp_rank == 0 else right

    return patch.object(SequenceParallel, "shard", faulty)


@fault("rotary table")
def rotary_from_local_frames():
    """E4: the second half of the sequence is taken for a video of its own."""

    def faulty(grids, *args):
        cos, sin = ORIGINAL["rotary_table"](grids, *args)
        half = len(cos) // 2
        return (torch.cat((x[:half], x[: len(x) - half])) for x in (cos, sin)) if world() > 1 else (cos, sin)

    return patch.object(model, "rotary_table", lambda *a: tuple(faulty(*a)))


@fault("rotary table", layout=RING)
def rotary_in_half_precision():
    """The table passes through bfloat16 on the way to its slice."""

    def faulty(self, x):
        right = ORIGINAL["shard"](self, x)
        return right.to(torch.bfloat16).to(x.dtype) if is_table(x) else right

    return patch.object(SequenceParallel, "shard", faulty)


# -- F. Length, padding, masks


@fault("patch embedding")
def remainder_dropped():
    """F1: a floor division loses the last tokens; zeros stand in for them."""

    def faulty(self, x):
        x = x.clone()
        if x.is_floating_point() and x.ndim == 2 and not is_table(x):
            x[len(x) // self.layout.sp * self.layout.sp :] = 0
        return ORIGINAL["shard"](self, x)

    return patch.object(SequenceParallel, "shard", faulty)


def attention_with(lengths_of):
    """Attention that is told other sample lengths."""

    def faulty(self, q, k, v, lengths):
        return ORIGINAL["attention"](self, q, k, v, lengths_of(lengths, len(q) * self.layout.sp))

    return patch.object(SequenceParallel, "attention", faulty)


def with_padding(lengths, total):
    return [*lengths[:-1], lengths[-1] + total - sum(lengths)]


@fault(r"blocks\.0: self-attention")
def padding_attended():
    """F3: padding passes for tokens of the last sample."""
    return attention_with(with_padding)


@fault(r"blocks\.0: self-attention", layout=RING)
def padding_attended_in_the_ring():
    """F3 under a ring."""
    return attention_with(with_padding)


@fault(r"blocks\.0: self-attention", layout=RING)
def packed_samples_mixed():
    """F8: the ring ignores where samples end."""
    return attention_with(lambda lengths, total: [sum(lengths)])


@fault(r"blocks\.0: cross-attention")
def text_cut_over_sp():
    """F6: each rank reads its share of the text."""

    def faulty(q, k, v, q_lengths, k_lengths):
        if world() > 1 and sum(q_lengths) != sum(k_lengths) and len(set(k_lengths)) == 1:
            half = k_lengths[0] // 2
            part = slice(0, half) if rank() % 2 == 0 else slice(half, None)
            k, v = (torch.cat([y[part] for y in x.split(k_lengths)]) for x in (k, v))
            k_lengths = [len(k) // len(k_lengths)] * len(k_lengths)
        return ORIGINAL["attend_each"](q, k, v, q_lengths, k_lengths)

    return patch.object(model, "attend_each", faulty)


# -- G. All-to-all layout, heads, groups


@fault(r"blocks\.0: self-attention")
def all_to_all_interleaved():
    """G1: the receive buffer is read in the wrong order of ranks and tokens."""

    def faulty(self, q, k, v, lengths):
        out = ORIGINAL["attention"](self, q, k, v, lengths)
        return out.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)

    return patch.object(SequenceParallel, "attention", faulty)


@fault(r"blocks\.0: self-attention")
def heads_swapped():
    """G5: head groups come back in another order."""

    def faulty(self, q, k, v, lengths):
        return ORIGINAL["attention"](self, q, k, v, lengths).roll(self.layout.ulysses, 1)

    return patch.object(SequenceParallel, "attention", faulty)


@fault(r"blocks\.0: self-attention", layout=BOTH | {"pack_tokens": 23})
def values_of_another_rank():
    """G7: the exchange uses one more rank than it should: values arrive shifted by a rank's tokens."""

    def faulty(self, q, k, v, lengths):
        return ORIGINAL["attention"](self, q, k, v.roll(1, 0), lengths)

    return patch.object(SequenceParallel, "attention", faulty)


# -- H. Ring attention


def ring_backward_with(name, faulty):
    def backward(ctx, grad):
        with patch.object(parallel, name, faulty):
            return ORIGINAL["backward"](ctx, grad)

    return static(RingAttention, "backward", backward)


@fault(SELF_ATTENTION_BACKWARD, layout=RING)
def stale_keys():
    """H1: the backward uses the first hop's keys at every hop."""

    def stale(kv, group):
        for hop, _, last in ORIGINAL["travel"](kv, group):
            yield hop, kv, last

    return ring_backward_with("travel", stale)


def block_delta_backward(grad, q, k, v, out, lse):
    """H2: rowsum(dP P) of this part's keys in place of rowsum(dO O), which is that of all keys."""
    scale = q.shape[-1] ** -0.5
    p = (torch.einsum("nhd,mhd->hnm", q, k) * scale - lse.transpose(0, 1).unsqueeze(-1)).exp()
    dp = torch.einsum("nhd,mhd->hnm", grad, v)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
    dq, dk = torch.einsum("hnm,mhd->nhd", ds, k), torch.einsum("hnm,nhd->mhd", ds, q)
    return [dq, dk, torch.einsum("hnm,nhd->mhd", p, grad)]


@fault(SELF_ATTENTION_BACKWARD, layout=RING)
def row_sum_per_block():
    """H2: a fix that is a bug, and passes where one rank holds all keys."""
    return ring_backward_with("flash_backward", block_delta_backward)


@fault(SELF_ATTENTION_BACKWARD, layout=RING)
def softmax_per_block_in_backward():
    """H5: probabilities normalised over this part's keys."""

    def faulty(grad, q, k, v, out, lse):
        local = ORIGINAL["flash_forward"](q, k, v)[1].to(lse.dtype)
        return ORIGINAL["flash_backward"](grad, q, k, v, out, local)

    return ring_backward_with("flash_backward", faulty)


@fault(SELF_ATTENTION_BACKWARD, layout=RING)
def key_gradients_stay():
    """H5: dK and dV of keys that came from another rank are not sent home."""

    class Stays(parallel.Exchange):
        def __init__(self, x, group, tag):
            super().__init__(x, group, tag)
            self.kept, self.tag = x, tag

        def wait(self):
            arrived = super().wait()
            return arrived if self.tag == 0 else self.kept

    return patch.object(parallel, "Exchange", Stays)


@fault(r"blocks\.0: self-attention", layout=RING)
def ring_merge_in_bf16():
    """H3: parts are merged in half precision."""

    def faulty(out, lse, part, part_lse):
        ORIGINAL["merge"](out, lse, part.to(torch.bfloat16), part_lse.to(torch.bfloat16))

    return patch.object(parallel, "merge", faulty)


@fault(r"blocks\.0: self-attention", layout=RING)
def ring_merge_unweighted():
    """H3: parts are added with equal weights."""

    def faulty(out, lse, part, part_lse):
        first = bool(torch.isinf(lse).any())
        ORIGINAL["merge"](out, lse, part, part_lse if first else lse.clone())

    return patch.object(parallel, "merge", faulty)


@fault(r"blocks\.0: self-attention", layout=RING)
def ring_overflow():
    """H4: a log-sum-exp without its maximum overflows: NaN."""

    def faulty(out, lse, part, part_lse):
        total = ((100 * lse).exp() + (1000 * part_lse).exp()).log()
        out.mul_((lse - total).exp().unsqueeze(-1)).add_(part * (part_lse - total).exp().unsqueeze(-1))
        lse.copy_(total)

    return patch.object(parallel, "merge", faulty)


# -- J. Clipping, optimizer, learning rate


def clipped_with(change):
    return patch.object(parallel, "clip_gradients", change)


@fault("clipping", layout=ULYSSES | {"shard": "full"})
def norm_of_the_local_shard():
    """J1: each rank clips by the norm of its own shard."""

    def faulty(parameters, max_norm):
        local = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in parameters]
        norm = torch.stack([g.norm() for g in local]).norm()
        torch._foreach_mul_(local, float(min(1, max_norm / norm)))
        return norm

    return clipped_with(faulty)


@fault("clipping")
def norm_counts_replicas():
    """J2: gradients that several ranks hold are counted once for each."""

    def faulty(parameters, max_norm):
        copies = 2**0.5 if world() > 1 else 1.0
        return ORIGINAL["clip_gradients"](parameters, max_norm / copies) * copies

    return clipped_with(faulty)


@fault("clipping", layout=DDP)
def one_rank_does_not_clip():
    """J1: the coefficient differs between ranks."""
    return clipped_with(lambda p, most: ORIGINAL["clip_gradients"](p, 0.0 if rank() == 1 else most))


@fault("learning rate")
def rate_scaled_by_world():
    """The rate is multiplied by the number of processes."""
    return patch.object(train, "learning_rate", lambda config, step: ORIGINAL["learning_rate"](config, step) * world())


@fault("learning rate", layout=DDP)
def rate_differs_on_a_rank():
    """A scheduler that steps on one rank only."""
    change = lambda config, step: ORIGINAL["learning_rate"](config, step) * (1 + 0.1 * (rank() == 2))  # noqa: E731
    return patch.object(train, "learning_rate", change)


@fault("optimizer update")
def decay_lost_under_sp():
    """Parameter groups are rebuilt without the weight decay."""

    def faulty(parameters, config):
        optimizer = ORIGINAL["make_optimizer"](parameters, config)
        for group in optimizer.param_groups:
            group["weight_decay"] *= float(world() == 1)
        return optimizer

    return patch.object(train, "make_optimizer", faulty)


@fault("optimizer update")
def one_group_not_updated():
    """I6: some parameters are in no group of the optimizer."""

    def faulty(parameters, config):
        return ORIGINAL["make_optimizer"](parameters[:-3] if world() > 1 else parameters, config)

    return patch.object(train, "make_optimizer", faulty)


@fault("weights after the resume", steps=3, stops=(2,), of_layout=False)
def moments_not_restored():
    """J6: a resumed run starts with an empty optimizer."""

    def faulty(folder, parts, *rest):
        step = ORIGINAL["load"](folder, parts, *rest)
        for part in parts.values():
            part.optimizer.state.clear()
        return step

    return patch.object(resume, "load", faulty)


@fault("data: (positions|samples)", steps=3, stops=(2,), of_layout=False)
def data_restarts_after_resume():
    """The resumed run takes the stream from its start."""

    def faulty(step, size, seed, dataset, dropout):
        return ORIGINAL["draws"](step - 2 if step >= 2 else step, size, seed, dataset, dropout)

    return patch.object(stream, "draws", faulty)


# -- K. Accumulation


@fault("gradient reduction", layout=BOTH | {"pack_tokens": 12, "batch_size": 8})
def reduced_with_every_pack():
    """B18: what has been reduced is reduced again with the next micro-batch."""

    def faulty(module, last):
        return nullcontext()

    def twice(bucket):
        dist.all_reduce(bucket.buffer())
        return done(bucket.buffer())

    @contextmanager
    def both():
        with patch.object(parallel, "synchronize", faulty), reducing(twice):
            yield

    return both()


@fault("gradient", steps=2, of_layout=False)
def gradients_not_cleared():
    """A step begins with the last one's gradients: wrong from step 2 on."""

    def faulty(parameters, config):
        optimizer = ORIGINAL["make_optimizer"](parameters, config)
        optimizer.zero_grad = lambda *args, **kwargs: None
        return optimizer

    return patch.object(train, "make_optimizer", faulty)


# -- L. Initialisation


@fault("weights at the start", layout=ULYSSES | {"shard": "full"})
def weights_seeded_by_rank():
    """L1: every rank makes other weights, and FSDP cuts shards from each."""
    seed = torch.manual_seed
    return patch.object(torch, "manual_seed", lambda number: seed(number + rank()))


@fault("weights at the start", layout=DDP)
def late_weights_seeded_by_rank():
    """I4: parameters that are initialised after the broadcast, from the rank's own generator."""

    def faulty(module, *args):
        wrapped = ORIGINAL["parallelize"](module, *args)
        if rank() == 3:
            with torch.no_grad():
                module.blocks[1].cross_attn.norm_q.weight.mul_(1.01)
        return wrapped

    return patch.object(parallel, "parallelize", faulty)


# -- N. Recomputation


@fault(r"blocks\.1: backward", layout=ULYSSES | {"recompute": "block"})
def recomputation_differs():
    """N: what the backward computes again is not what the forward computed."""
    body = model.Block.body
    calls: dict = {}

    def faulty(self, x, *rest):
        calls[id(self)] = calls.get(id(self), 0) + 1
        again = calls[id(self)] % 2 == 0 and world() > 1
        return body(self, x * 1.01 if again else x, *rest)

    return patch.object(model.Block, "body", faulty)


# -- O. Batch > 1


@fault("head", of_layout=False)
def head_takes_the_first_samples_time():
    """O1: the head's modulation broadcasts one sample's time: right for a batch of one."""
    forward = model.Head.forward
    return patch.object(model.Head, "forward", lambda self, x, t, pack: forward(self, x, t[:1].expand_as(t), pack))


@fault("timesteps handed to the model", of_layout=False)
def one_timestep_per_batch():
    """O1: the model gets the first sample's timestep for all."""

    def pack_loss(wrapped, pack, layout, dtype):
        changed = dataclasses.replace(pack, timesteps=[pack.timesteps[0]] * len(pack.timesteps))
        loss = ORIGINAL["pack_loss"](wrapped, changed, layout, dtype)
        pack.shares = changed.shares
        return loss

    return patch.object(batch, "pack_loss", pack_loss)
