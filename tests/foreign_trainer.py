"""A small trainer in another style, with conventions of its own: batches (B, L, C), a sequence-parallel attention that
gathers keys and values, a loss that is a mean over the rank's samples, gradients summed over the sequence-parallel
ranks and averaged over the data-parallel ones by hand. It imports nothing of picowan but Trace. FAULTS are planted by
name.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from parity import Trace, row_ids

WIDTH, LENGTH, BATCH = 16, 12, 4
FAULTS = ("rope_restarts", "gather_without_backward", "averaged_over_sp", "noise_per_rank", "head_detached")


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fault):
        ctx.fault = fault
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(GROUP[0]))]
        dist.all_gather(parts, x.contiguous(), group=GROUP[0])
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=GROUP[0])
        n, rank = dist.get_world_size(GROUP[0]), dist.get_rank(GROUP[0])
        out = grad.chunk(n, 1)[rank].contiguous()
        return out * 0 if ctx.fault == "gather_without_backward" else out, None


GROUP: list = [None]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, angles, sp, fault):  # (B, l, C)
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = (y * angles.cos() + y.roll(1, -1) * angles.sin() for y in (q, k))
        if sp > 1:
            k, v = Gather.apply(k, fault), Gather.apply(v, fault)
        return self.proj(F.scaled_dot_product_attention(q, k, v))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.norm = Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x, angles, sp, fault):
        x = x + self.attn(self.norm(x), angles, sp, fault)
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Linear(4, WIDTH), nn.ModuleList(Layer() for _ in range(2))
        self.time, self.head = nn.Linear(1, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x, t, angles, sp, fault):
        x = self.embed(x) + self.time(t[:, None, None])
        for layer in self.layers:
            x = layer(x, angles, sp, fault)
        return self.head(x.detach() + 0 * x if fault == "head_detached" else x)


def train(folder, sp=1, fault="", steps=2, alone=False):
    """Train for some steps in this process and its group, traced into `folder`."""
    rank, world = (0, 1) if alone or not dist.is_initialized() else (dist.get_rank(), dist.get_world_size())
    dp, dp_rank, sp_rank, l = world // sp, rank // sp, rank % sp, LENGTH // sp
    if world > 1 and GROUP[0] is None:
        groups = [dist.new_group(list(range(i, i + sp))) for i in range(0, world, sp)]
        GROUP[0] = groups[dp_rank]
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    taps = {"embed": "tokens", "layers.*.attn": "tokens", "layers.?": "tokens", "head": "tokens"}
    trace = Trace(model, folder, taps, optimizer, sp=sp, world=world, share=1 / dp)
    for step in range(steps):
        mine = list(range(dp_rank * BATCH // dp, (dp_rank + 1) * BATCH // dp))
        ids = [step * BATCH + i for i in mine]
        seeds = [i + 1000 * rank * (fault == "noise_per_rank") for i in ids]
        noise = torch.stack(
            [torch.randn(LENGTH, 4, generator=torch.Generator().manual_seed(s)) for s in seeds]
        ).double()
        clean = torch.stack([torch.linspace(-1, 1 + i % 5, LENGTH * 4).view(LENGTH, 4) for i in ids]).double()
        t = torch.tensor([(i * 0.37) % 1 for i in ids]).double()
        here = slice(sp_rank * l, (sp_rank + 1) * l)
        place = torch.arange(LENGTH)[here] - (sp_rank * l if fault == "rope_restarts" else 0)
        angles = place[:, None] * torch.arange(1, WIDTH + 1) / WIDTH
        noised = (1 - t[:, None, None]) * clean + t[:, None, None] * noise
        with trace.step(step), trace.pack(tokens=row_ids(ids, sp_rank * l, l), samples=row_ids(ids, 0, 1)[:, 0]):
            trace.add("input", "noise", noise, "samples", counts=sp_rank == 0, agree="sp")
            trace.add("forward", "rotary", angles.expand(len(ids), l, WIDTH), "tokens")
            prediction = model(noised[:, here], t, angles, sp, fault)
            loss = (prediction - (noise - clean)[:, here]).square().sum() / (len(ids) * LENGTH * 4)
            loss.backward()
            trace.loss(loss)
            for p in model.parameters() if world > 1 else ():
                dist.all_reduce(p.grad)
                p.grad /= dp * (sp if fault == "averaged_over_sp" else 1)
            trace.gradients()
            optimizer.step()
            trace.updated(lr=optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
