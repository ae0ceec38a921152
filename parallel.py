"""Process layouts, sequence parallelism (Ulysses x ring) and data parallelism (DDP, FSDP2).

The contract: the loss is the sum over all ranks of what each computes from its own tokens; every backward below is the
exact adjoint of its forward; so the sum over all ranks of a parameter's gradients is its gradient. Nothing is averaged,
and no factor of the world size, of sp or of the number of micro-batches appears anywhere.

    world = dp x sp, sp = ulysses x ring            rank = (dp_rank * ring + ring_rank) * ulysses + ulysses_rank
    U  ulysses ranks    W  ring ranks               Ulysses innermost: its all-to-all wants the fastest links
    L  tokens of the pack, filled up to sp * l      l  tokens of this rank        n = U * l  tokens of a ring rank
    H  heads            D  width of a head          h = H / U  heads of this rank inside attention

Sources: Jacobs et al. 2023 (Ulysses), Liu et al. 2023 (ring attention), Dao 2023 (FlashAttention-2, for the backward
from a log-sum-exp), Milakov & Gimelshein 2018 (merging partial softmaxes).
"""

import contextlib
import math
import os
import socket
import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from model import LOCAL, attend_each

# torch 2.13 renamed these two and warns of the old names; 2.11 has only the old ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# ---------------------------------------------------------------------------------------------------------------------
# The layout


@dataclass(frozen=True)
class Layout:
    """Who this process is. Groups are None where they would hold this rank alone."""

    rank: int = 0
    world: int = 1
    ulysses: int = 1
    ring: int = 1
    device: torch.device = torch.device("cpu")
    ulysses_group: object = None
    ring_group: object = None
    patient_group: object = None  # for waits of hours: one rank encodes while the others have nothing to do

    @property
    def sp(self) -> int:
        return self.ulysses * self.ring

    @property
    def dp(self) -> int:
        return self.world // self.sp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.sp

    @property
    def sp_rank(self) -> int:
        return self.rank % self.sp

    def seam(self):
        """The object to pass to the model as `sp`."""
        return LOCAL if self.sp == 1 else SequenceParallel(self)

    def barrier(self):
        """Wait until every rank is here; outlasts the timeout that guards the other collectives."""
        if self.world > 1:
            dist.barrier(self.patient_group)

    def on_rank_0(self, function, *args):
        """What function(*args) returns on rank 0, on every rank. What it raises there is raised there; the other ranks
        stop with a ValueError."""
        outcome, failure = [None, None], None
        if self.rank == 0:
            try:
                outcome[0] = function(*args)
            except Exception as error:  # raised below, once the others know
                outcome[1], failure = str(error) or repr(error), error
        if self.world > 1:
            dist.broadcast_object_list(outcome, group=self.patient_group)
        if failure is not None:
            raise failure
        if outcome[1] is not None:
            raise ValueError(f"rank 0 failed: {outcome[1]}")
        return outcome[0]

    def gather_objects(self, mine: list) -> list:
        """Every rank's list, end to end in the order of ranks."""
        everyones = [mine]
        if self.world > 1:
            everyones = [None] * self.world
            dist.all_gather_object(everyones, mine)
        return [x for part in everyones for x in part]

    def check_shared(self, folder: Path, what: str) -> None:
        """ValueError, on every rank, unless all ranks see rank 0's folder of this name. On several machines one on a
        machine's own disk is another folder there; every rank calls."""
        if self.world == 1:
            return

        def mark() -> str:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
            return str(folder.resolve())

        name = self.on_rank_0(lambda: f"{uuid.uuid4().hex}.partial")
        place = self.on_rank_0(mark)
        blind = self.gather_objects([] if (folder / name).exists() else [f"rank {self.rank} on {socket.gethostname()}"])
        self.on_rank_0((folder / name).unlink)
        if blind:
            raise ValueError(
                f"{what} must be one folder that all machines share: {blind[0]} does not see {place} of rank 0 as "
                f"{folder}"
            )

    def sum(self, x: Tensor) -> Tensor:
        """x summed over all ranks, in place."""
        if self.world > 1:
            dist.all_reduce(x)
        return x


def split_sp(world: int, heads: int, sp: int, ulysses: int, ring: int) -> tuple[int, int]:
    """(ulysses, ring) from the command line's --sp, --ulysses and --ring (0 = not given), or a ValueError.

    Without an order, Ulysses takes the largest divisor of sp that divides the heads and the ring the rest.
    """
    sp = sp or (ulysses or 1) * (ring or 1)
    if sp < 1 or world % sp:
        raise ValueError(f"--sp {sp} does not divide the {world} processes; start a multiple of {sp} (torchrun)")
    best = max(u for u in range(1, sp + 1) if sp % u == 0 and heads % u == 0)
    ulysses = ulysses or (sp // ring if ring and sp % ring == 0 else best)
    ring = ring or max(1, sp // ulysses)
    if ulysses * ring != sp:
        raise ValueError(
            f"--ulysses {ulysses} x --ring {ring} is not --sp {sp}; use --ulysses {best} --ring {sp // best}"
        )
    if heads % ulysses:
        raise ValueError(
            f"{heads} heads do not split over --ulysses {ulysses}; use --ulysses {best} --ring {sp // best}"
        )
    return ulysses, ring


def world_from_torchrun() -> tuple[int, int]:
    """(rank, world) as torchrun's environment variables say; (0, 1) without torchrun."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def first_on_this_machine() -> bool:
    """Whether this process is the one of its machine that says what all of them found."""
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def start(ulysses: int = 1, ring: int = 1, timeout_minutes: float = 30) -> Layout:
    """Join the process group that torchrun describes and make the layout's groups (every rank must call this)."""
    rank, world = world_from_torchrun()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if world == 1:
        return Layout(device=device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))
    ranks = torch.arange(world).view(-1, ring, ulysses)  # (dp, ring, ulysses)
    return Layout(
        rank,
        world,
        ulysses,
        ring,
        device,
        own_group(ranks.flatten(0, 1).tolist(), rank),
        own_group(ranks.transpose(1, 2).flatten(0, 1).tolist(), rank),
        dist.new_group(backend="gloo", timeout=timedelta(days=2)),
    )


def own_group(partition: list[list[int]], rank: int):
    """Make every group of a partition of the world (all ranks must, in the same order) and return this rank's."""
    if len(partition[0]) == 1:
        return None
    groups = [dist.new_group(ranks) for ranks in partition]
    return next(group for group, ranks in zip(groups, partition, strict=True) if rank in ranks)


# ---------------------------------------------------------------------------------------------------------------------
# Collectives as autograd functions


class AllToAll(torch.autograd.Function):
    """x (U, ...): slice i goes to rank i, slice j of the result comes from rank j.

    Rank i's slice j and rank j's slice i change places: a permutation of numbers, its own inverse, and the adjoint of
    a permutation is its inverse. So the backward is the same exchange of the gradients.
    """

    @staticmethod
    def forward(ctx, x: Tensor, group) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        return AllToAll.apply(grad, ctx.group), None


class AllGather(torch.autograd.Function):
    """x (l, ...) of every rank -> (U * l, ...), laid end to end.

    Each rank's x is copied to every rank, so its gradient is the sum of what every rank's copy received: the backward
    is a reduce-scatter by sum. That is the adjoint whatever follows; it holds in particular when each rank's loss uses
    only part of the gathered tensor. (PyTorch's own all_gather_into_tensor has no backward.)
    """

    @staticmethod
    def forward(ctx, x: Tensor, group) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
        all_gather_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad = grad.contiguous()
        out = grad.new_empty(grad.shape[0] // dist.get_world_size(ctx.group), *grad.shape[1:])
        reduce_scatter_single(out, grad, group=ctx.group)
        return out, None


class SequenceParallel:
    """The model's seam over sp ranks: rank s holds tokens s * l ... (s + 1) * l - 1 of the pack."""

    def __init__(self, layout: Layout):
        self.layout = layout

    def shard(self, x: Tensor) -> Tensor:
        """(L, ...) -> (l, ...), l = ceil(L / sp); zeros fill the last ranks up. A plain slice: autograd's backward of
        it places the gradient in zeros, which is the adjoint."""
        sp, rank = self.layout.sp, self.layout.sp_rank
        l = math.ceil(len(x) / sp)
        x = x[rank * l : (rank + 1) * l]
        return F.pad(x, (0, 0) * (x.ndim - 1) + (0, l - len(x))) if len(x) < l else x

    def gather(self, x: Tensor) -> Tensor:
        """(l, ...) -> (sp * l, ...): first over the Ulysses ranks, which are neighbours, then over the ring."""
        for group in (self.layout.ulysses_group, self.layout.ring_group):
            if group is not None:
                x = AllGather.apply(x, group)
        return x

    @torch.compiler.disable  # a compiler that inlines collectives into the graph loses their gradients (deepspeed#8491)
    def attention(self, q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
        """Self-attention per sample of the pack; q, k, v (l, H, D) -> (l, H, D), zero for padding tokens."""
        U, group = self.layout.ulysses, self.layout.ulysses_group
        if group is not None:
            # Trade tokens for heads: afterwards this rank has the tokens of all U ranks, for h = H / U of the heads.
            x = torch.stack((q, k, v)).unflatten(2, (U, -1))  # (3, l, U, h, D)
            x = AllToAll.apply(x.permute(2, 0, 1, 3, 4), group)  # (U, 3, l, h, D)
            q, k, v = x.transpose(0, 1).flatten(1, 2)  # (n, h, D) each
        if self.layout.ring_group is not None:
            out = RingAttention.apply(q, k, v, lengths, self.layout.ring_group)
        else:
            L = sum(lengths)
            out = attend_each(q[:L], k[:L], v[:L], lengths, lengths)
            out = F.pad(out, (0, 0, 0, 0, 0, len(q) - L))
        if group is not None:
            out = AllToAll.apply(out.unflatten(0, (U, -1)), group)  # (U, l, h, D): head group i is slice i
            out = out.transpose(0, 1).flatten(1, 2)  # (l, H, D)
        return out


# ---------------------------------------------------------------------------------------------------------------------
# Ring attention


class RingAttention(torch.autograd.Function):
    """Each rank keeps its queries; keys and values travel around the ring, one hop ahead of the computation.

    A hop attends to a part of the keys and returns that part's output and log-sum-exp. Two parts merge into the
    softmax over their union: with lse = log(e^a + e^b), out = e^(a - lse) out_a + e^(b - lse) out_b.

    Backward: from the *global* output and log-sum-exp the probabilities of any part are exp(q k - lse), already
    normalised over all keys, and the row sums (out . dout) in the softmax's derivative are the global ones too. So
    the flash backward kernel, given the global out and lse, returns that part's exact dK, dV and share of dQ. The
    keys go around once more, and dK, dV travel with them, gathering each rank's share until they are home.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], group) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)  # (n, h, D)
        lse = torch.full(q.shape[:2], -math.inf, dtype=wide, device=q.device)  # (n, h)
        for hop, kv, _ in travel(torch.stack((k, v)), group):
            for mine, theirs in overlaps(lengths, len(q), hop, group):
                part, part_lse = flash_forward(q[mine], *kv[:, theirs])
                merge(out[mine], lse[mine], part, part_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.lengths, ctx.group = lengths, group
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        home = torch.zeros((2, *k.shape), dtype=lse.dtype, device=q.device)  # dK and dV of the keys now here
        pending = None
        for hop, kv, last in travel(torch.stack((k, v)), ctx.group):
            share = torch.zeros_like(home)
            for mine, theirs in overlaps(ctx.lengths, len(q), hop, ctx.group):
                dq_part, dk, dv = flash_backward(grad[mine], q[mine], *kv[:, theirs], out[mine], lse[mine])
                dq[mine] += dq_part
                share[0, theirs] += dk
                share[1, theirs] += dv
            # The gradients of these keys so far arrive from the rank that had the keys before; add, and send them on.
            home = share if pending is None else pending.wait().add_(share)
            pending = Exchange(home, ctx.group, tag=1)
            if last:
                dk, dv = pending.wait()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


class Exchange:
    """Send x to the next rank of the ring and receive the previous rank's, in the background."""

    def __init__(self, x: Tensor, group, tag: int):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        to, source = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
        self.sent, self.received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        send = dist.P2POp(dist.isend, self.sent, to, group, tag)
        receive = dist.P2POp(dist.irecv, self.received, source, group, tag)
        self.requests = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Tensor:
        for request in self.requests:
            request.wait()
        return self.received


def travel(kv: Tensor, group):
    """Yield (hop, that hop's keys and values, whether it is the last), with the next hop's already on their way.

    At hop i this rank has the keys of ring rank (rank - i) mod W.
    """
    W = dist.get_world_size(group)
    for hop in range(W):
        last = hop == W - 1
        coming = None if last else Exchange(kv, group, tag=0)
        yield hop, kv, last
        if coming is not None:
            kv = coming.wait()


def overlaps(lengths: list[int], n: int, hop: int, group) -> list[tuple[slice, slice]]:
    """For each sample that has tokens both here and in the keys of this hop: its (query, key) slices, both not empty.

    Ring rank r owns tokens r * n ... (r + 1) * n - 1 of the pack; padding lies behind the last sample, so it is in
    no slice.
    """
    rank, W = dist.get_rank(group), dist.get_world_size(group)
    owner = (rank - hop) % W
    pairs, start = [], 0
    for length in lengths:
        stop = start + length
        mine, theirs = (slice(max(start, r * n) - r * n, min(stop, (r + 1) * n) - r * n) for r in (rank, owner))
        if mine.start < mine.stop and theirs.start < theirs.stop:
            pairs.append((mine, theirs))
        start = stop
    return pairs


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor):
    """Fold a part's output (n, h, D) and log-sum-exp (n, h) into the running ones, in place, in their precision."""
    total = torch.logaddexp(lse, part_lse.to(lse.dtype))
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.addcmul_(part.to(out.dtype), (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(0, 1).unsqueeze(0) for x in tensors]  # (n, h, D) -> (1, h, n, D)


def tokens_first(*tensors: Tensor) -> list[Tensor]:
    return [x.squeeze(0).transpose(0, 1) for x in tensors]  # (1, h, n, D) -> (n, h, D), and (1, h, n) -> (n, h)


def flash_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of q (n, h, D) to k, v (m, h, D): output (n, h, D) and natural log-sum-exp (n, h).

    PyTorch's own kernels. CUDA's flash kernel takes half precision only; float32 and float64 go the plain way there.
    """
    if not q.is_cuda:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads_first(q, k, v))
    elif q.dtype in (torch.float16, torch.bfloat16):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(*heads_first(q, k, v))[:2]
    else:
        return plain_forward(q, k, v)
    out, lse = tokens_first(out, lse)
    return out, lse


def flash_backward(grad, q, k, v, out, lse) -> list[Tensor]:
    """dQ, dK, dV of `flash_forward`; out and lse may be those of the softmax over more keys than k holds."""
    if q.is_cuda and q.dtype not in (torch.float16, torch.bfloat16):
        return plain_backward(grad, q, k, v, out, lse)
    tensors, lse = heads_first(grad, q, k, v, out), lse.transpose(0, 1).unsqueeze(0).contiguous()
    if not q.is_cuda:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return tokens_first(*kernel(*tensors, lse, 0.0, False))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the state of a dropout that is not there
    return tokens_first(*kernel(*tensors, lse, None, None, len(q), len(k), 0.0, False, unused, unused))


def plain_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`flash_forward` spelled out, with the (h, n, m) scores in memory: the definition, and the tests' oracle."""
    scores = torch.einsum("nhd,mhd->hnm", q, k) / q.shape[-1] ** 0.5
    lse = scores.logsumexp(-1)
    return torch.einsum("hnm,mhd->nhd", (scores - lse.unsqueeze(-1)).exp(), v), lse.transpose(0, 1)


def plain_backward(grad, q, k, v, out, lse) -> list[Tensor]:
    """`flash_backward` spelled out: P = exp(scores - lse), dS = P * (dP - rowsum(out * dout)); FlashAttention-2."""
    scale = q.shape[-1] ** -0.5
    p = (torch.einsum("nhd,mhd->hnm", q, k) * scale - lse.transpose(0, 1).unsqueeze(-1)).exp()
    row = (grad * out).sum(-1).transpose(0, 1).unsqueeze(-1)  # (h, n, 1)
    ds = p * (torch.einsum("nhd,mhd->hnm", grad, v) - row) * scale
    dq, dk = torch.einsum("hnm,mhd->nhd", ds, k), torch.einsum("hnm,nhd->mhd", ds, q)
    return [dq, dk, torch.einsum("hnm,nhd->mhd", p, grad)]


# ---------------------------------------------------------------------------------------------------------------------
# Data parallelism


def parallelize(
    model: nn.Module, layout: Layout, shard: str, precision: str, recompute: str, compile: bool
) -> nn.Module:
    """Prepare the model in place and return what the training step calls; shard is none (DDP), grads or full (FSDP2).

    The order matters: recomputation wraps the compiled block, and sharding wraps both, so that a block run again in
    the backward finds its parameters gathered once. Gradients are summed over the whole world: sequence-parallel
    ranks hold shares of one gradient just as data-parallel ranks do. Parameters that do not require a gradient are
    sharded with the others and never reduced; set that before.
    """
    if precision == "bf16":
        narrow_frozen(model)
    for block in model.blocks:
        block.recompute = recompute == "block"
        if compile:
            block.body = torch.compile(block.body)
    if layout.world == 1:
        return model
    if shard == "none":
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        wrapped.register_comm_hook(None, sum_gradients)
        return wrapped
    mesh = init_device_mesh(layout.device.type, (layout.world,))
    # Blocks hold nearly all weights: under bf16 they travel in bf16. Gradients are always added up in the master dtype.
    if precision == "bf16":
        narrow = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    else:
        narrow = MixedPrecisionPolicy(cast_forward_inputs=False)
    again = shard == "full"
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=narrow, reshard_after_forward=again)
    fully_shard(
        model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), reshard_after_forward=False
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # a sum, where FSDP's default is the mean
            module.set_force_sum_reduction_for_comms(True)  # else a scaled sum in float32, which gloo lacks
    return model


def narrow_frozen(model: nn.Module):
    """Keep the blocks' frozen matrices in bfloat16, the dtype they are only ever read in: half the memory. FSDP2 takes
    them beside trained weights in float32; it asks for one dtype among the trained alone."""
    for parameter in model.blocks.parameters():
        if not parameter.requires_grad and parameter.ndim == 2:
            parameter.data = parameter.data.to(torch.bfloat16)


def shard_frozen(module: nn.Module, blocks: nn.ModuleList, layout: Layout) -> nn.Module:
    """Split a frozen module's weights over all ranks, in place, for the forward alone: each keeps 1/world of them, and
    each of `blocks` is whole on a rank only while it computes. May be done on the meta device, before loading.

    The weights are gathered by all ranks together, so every rank must make equally many passes; the inputs may differ.
    """
    if layout.world == 1:
        return module
    module.requires_grad_(False)
    mesh = init_device_mesh(layout.device.type, (layout.world,))
    for part in (*blocks, module):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    return module


def reshard(model: nn.Module):
    """Give up what FSDP2 gathered for forwards that had no backward: it keeps it and would compute the next forward
    with it, whatever became of the shards meanwhile."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def sum_gradients(_, bucket) -> torch.futures.Future[Tensor]:
    """DDP's communication hook: add the bucket up over all ranks. (Without a hook DDP divides by the world.)"""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def synchronize(wrapped: nn.Module, last: bool):
    """A context for one micro-batch: DDP adds gradients over ranks with the last one only; FSDP2 with each, since it
    keeps no rank's whole gradient."""
    later = isinstance(wrapped, DistributedDataParallel) and not last
    return wrapped.no_sync() if later else contextlib.nullcontext()


def clip_gradients(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients so that their joint norm is at most max_norm (0: leave them); returns the norm before.

    The norm is that of the whole gradient, whatever part of it this rank holds: FSDP's gradients are DTensors, whose
    norm is reduced over their shards; DDP's are whole on every rank.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def stop():
    if dist.is_initialized():
        dist.destroy_process_group()
