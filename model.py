"""The Wan video diffusion transformer (2.1 and 2.2), as one process sees it.

A forward pass takes a *pack*: samples of any size, their tokens laid end to end in one sequence. Self-attention runs
per sample, everything else per token. Where the tokens live is the business of one object, `sp`, with three methods
(`shard`, `attention`, `gather`); LOCAL below is the one for a single process, parallel.py has the one for many.

    S  samples of the pack          L  tokens of the pack        l  tokens on this rank (l = L where there is one)
    C  width of the model           H  heads                     D  width of a head, H * D = C
    F  latent frames                R  modulation rows: one per sample, or one per (sample, frame)
    T  text tokens after padding    P  values of one patch, patch_t * patch_h * patch_w * channels

Parameters carry the official checkpoints' names, so their state dicts load as they are. Sources: Wan2.1
`wan/modules/model.py`, Wan2.2 `wan/modules/model.py`; Peebles & Xie 2023 (adaLN); Su et al. 2021 (rotary embedding).
"""

import math
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class WanConfig:
    """The official configuration's fields, and `clip_dim`, which the official code keeps as a constant."""

    model_type: str = "t2v"  # t2v | i2v | flf2v | ti2v
    dim: int = 2048
    ffn_dim: int = 8192
    num_heads: int = 16
    num_layers: int = 32
    in_dim: int = 16  # channels the patch embedding reads: latents, then the condition's
    out_dim: int = 16
    text_dim: int = 4096
    text_len: int = 512  # prompts are padded with zero states to this length, and the padding is attended to
    freq_dim: int = 256  # width of the sinusoidal timestep embedding
    patch_size: tuple[int, int, int] = (1, 2, 2)
    eps: float = 1e-6
    qk_norm: bool = True
    cross_attn_norm: bool = True
    window_size: tuple[int, int] = (-1, -1)  # official field; only global attention was ever released
    clip_dim: int = 1280  # width of the CLIP features that Wan 2.1's i2v and flf2v read; 0 for Wan 2.2's i2v

    def __post_init__(self):
        object.__setattr__(self, "patch_size", tuple(self.patch_size))
        object.__setattr__(self, "window_size", tuple(self.window_size))
        if self.model_type not in ("t2v", "i2v", "flf2v", "ti2v"):
            raise ValueError(f"model_type {self.model_type!r} is none of t2v, i2v, flf2v, ti2v")
        if self.dim % self.num_heads or self.dim // self.num_heads % 2:
            raise ValueError(f"dim {self.dim} over {self.num_heads} heads is not an even head width")
        if not (self.qk_norm and self.cross_attn_norm and self.window_size == (-1, -1)):
            raise ValueError("every released Wan model has qk_norm, cross_attn_norm and window_size (-1, -1)")

    @property
    def reads_clip(self) -> bool:
        return self.model_type in ("i2v", "flf2v") and self.clip_dim > 0


DEMO = dict(dim=128, ffn_dim=512, num_heads=4, num_layers=4, text_dim=64, text_len=32, freq_dim=64)
CONFIGS = {
    "demo": WanConfig(**DEMO),
    "demo-i2v": WanConfig("i2v", in_dim=36, clip_dim=32, **DEMO),
    "demo-flf2v": WanConfig("flf2v", in_dim=36, clip_dim=32, **DEMO),
    "demo-t2v-experts": WanConfig(**DEMO),
    "demo-i2v-experts": WanConfig("i2v", in_dim=36, clip_dim=0, **DEMO),
    "demo-ti2v": WanConfig("ti2v", in_dim=48, out_dim=48, **DEMO),
    "wan2.1-t2v-1.3b": WanConfig("t2v", dim=1536, ffn_dim=8960, num_heads=12, num_layers=30),
    "wan2.1-t2v-14b": WanConfig("t2v", dim=5120, ffn_dim=13824, num_heads=40, num_layers=40),
    "wan2.1-i2v-14b": WanConfig("i2v", dim=5120, ffn_dim=13824, num_heads=40, num_layers=40, in_dim=36),
    "wan2.1-flf2v-14b": WanConfig("flf2v", dim=5120, ffn_dim=13824, num_heads=40, num_layers=40, in_dim=36),
    "wan2.2-t2v-a14b": WanConfig("t2v", dim=5120, ffn_dim=13824, num_heads=40, num_layers=40),
    "wan2.2-i2v-a14b": WanConfig("i2v", dim=5120, ffn_dim=13824, num_heads=40, num_layers=40, in_dim=36, clip_dim=0),
    "wan2.2-ti2v-5b": WanConfig("ti2v", dim=3072, ffn_dim=14336, num_heads=24, num_layers=30, in_dim=48, out_dim=48),
}


# ---------------------------------------------------------------------------------------------------------------------
# The seam, single-process side


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v of S samples of one size; q (S, n, H, D), k and v (S, m, H, D) -> (S, n, H, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (S, H, n, D)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def attend_each(q: Tensor, k: Tensor, v: Tensor, q_lengths: list[int], k_lengths: list[int]) -> Tensor:
    """`attend` for samples laid end to end: sample i owns q_lengths[i] queries and k_lengths[i] keys. Neighbours of the
    same size share a call; q (n, H, D), k and v (m, H, D) -> (n, H, D)."""
    parts, i, j = [], 0, 0
    for (n, m), samples in groupby(zip(q_lengths, k_lengths, strict=True)):
        S = len(list(samples))
        mine, theirs = slice(i, i + S * n), slice(j, j + S * m)
        i, j = mine.stop, theirs.stop
        if n > 0:
            group = q[mine].unflatten(0, (S, n)), k[theirs].unflatten(0, (S, m)), v[theirs].unflatten(0, (S, m))
            parts.append(attend(*group).flatten(0, 1))
    return join(parts)


class Local:
    """The seam for one process: it holds every token."""

    def shard(self, x: Tensor) -> Tensor:
        """This rank's even slice of dim 0; with several ranks, zeros fill the last slices up."""
        return x

    def attention(self, q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
        """Self-attention per sample; q, k, v (l, H, D) are this rank's tokens, lengths the samples' in the pack."""
        return attend_each(q, k, v, lengths, lengths)

    def gather(self, x: Tensor) -> Tensor:
        """The inverse of `shard`, up to the zeros that filled it; differentiable."""
        return x


LOCAL = Local()


# ---------------------------------------------------------------------------------------------------------------------
# Geometry: from latents to tokens, and what each token carries


def patchify(latents: Tensor, patch_size: tuple[int, int, int]) -> Tensor:
    """(channels, F, H, W) -> (tokens, P), tokens in (frame, row, column) order, values in the model's output order."""
    c, (pt, ph, pw) = latents.shape[0], patch_size
    f, h, w = grid_of(latents.shape, patch_size)
    x = latents.reshape(c, f, pt, h, ph, w, pw)
    return x.permute(1, 3, 5, 2, 4, 6, 0).reshape(f * h * w, pt * ph * pw * c)


def unpatchify(tokens: Tensor, shape: tuple[int, int, int, int], patch_size: tuple[int, int, int]) -> Tensor:
    """The inverse of `patchify`; shape is the latents' (channels, F, H, W)."""
    c, (pt, ph, pw) = shape[0], patch_size
    f, h, w = grid_of(shape, patch_size)
    x = tokens.reshape(f, h, w, pt, ph, pw, c)
    return x.permute(6, 0, 3, 1, 4, 2, 5).reshape(shape)


def grid_of(shape, patch_size: tuple[int, int, int]) -> tuple[int, int, int]:
    """Tokens along (time, height, width) of latents (channels, F, H, W)."""
    if len(shape) != 4 or any(n % p for n, p in zip(shape[1:], patch_size, strict=True)):
        raise ValueError(f"latents {tuple(shape)} are not (channels, F, H, W) in whole patches of {patch_size}")
    return tuple(n // p for n, p in zip(shape[1:], patch_size, strict=True))


def rotary_table(grids: list[tuple[int, int, int]], head_dim: int, device, dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine (L, D / 2) of every token's rotation angles.

    The head's pairs are dealt to time, height and width; axis a with d_a values turns pair j by
    position / 10000^(2 j / d_a) (RoFormer, eq. 15; the split is `rope_params` in the official model.py). Every sample
    starts at position 0. Angles are computed in float64.
    """
    side = 2 * (head_dim // 6)
    tables = []
    for grid in grids:
        angles = []
        for axis, d in enumerate((head_dim - 2 * side, side, side)):
            frequency = 10000.0 ** -(torch.arange(0, d, 2, device=device, dtype=torch.float64) / d)
            position = torch.arange(grid[axis], device=device, dtype=torch.float64)
            shape = [1, 1, 1, len(frequency)]
            shape[axis] = grid[axis]
            angles.append(torch.outer(position, frequency).view(shape).expand(*grid, -1))
        tables.append(torch.cat(angles, dim=-1).flatten(0, 2))  # (tokens of the sample, D / 2)
    table = torch.cat(tables)
    return table.cos().to(dtype), table.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x (l, H, D): pair (2j, 2j + 1) turns by angle j; cos and sin (l, D / 2)."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)  # (l, H, D / 2)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def sinusoid(timesteps: Tensor, dim: int) -> Tensor:
    """(R,) timesteps -> (R, dim): cosines, then sines, of t / 10000^(2 i / dim), in float64."""
    half = dim // 2
    frequency = 10000.0 ** -(torch.arange(half, device=timesteps.device, dtype=torch.float64) / half)
    angle = torch.outer(timesteps.to(torch.float64), frequency)
    return torch.cat((angle.cos(), angle.sin()), dim=1)


@dataclass(frozen=True)
class Pack:
    """What the blocks must know of the pack's layout: Python ints, so that no block waits for the device."""

    sp: object
    lengths: list[int]  # tokens of each sample, in the whole pack
    here: list[int]  # tokens of each sample on this rank; the last sample's count includes this rank's padding
    runs: list[tuple[int, int]]  # (modulation row, tokens) of consecutive tokens on this rank that share a row


def layout(grids: list[tuple[int, int, int]], frame_rows: list[int], sp) -> Pack:
    """Cut the pack's sample and row indices as the tokens are cut, and read off what lies on this rank.

    frame_rows: how many modulation rows each sample has, 1 or its number of frames.
    Padding tokens (sp.shard fills with zeros) join the last sample's text and row 0: they keep every parameter in the
    graph on a rank that holds nothing else, and nobody reads what becomes of them.
    """
    lengths = [math.prod(grid) for grid in grids]
    sample = torch.repeat_interleave(torch.arange(len(grids)), torch.tensor(lengths))
    here = torch.bincount(sp.shard(sample + 1), minlength=len(grids) + 1).tolist()  # [padding, sample 0, sample 1, ...]
    here[-1] += here[0]
    tokens_of_row = [n // rows for n, rows in zip(lengths, frame_rows, strict=True) for _ in range(rows)]
    row = torch.repeat_interleave(torch.arange(len(tokens_of_row)), torch.tensor(tokens_of_row))
    rows, counts = torch.unique_consecutive(sp.shard(row), return_counts=True)
    return Pack(sp, lengths, here[1:], list(zip(rows.tolist(), counts.tolist(), strict=True)))


# ---------------------------------------------------------------------------------------------------------------------
# Layers. Each computes in its input's dtype, norms and modulation in at least float32; float64 stays float64.


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Linear(nn.Linear):
    """nn.Linear that computes in its input's dtype, so float32 weights serve a bfloat16 pass and get float32 grads."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm for an input of any dtype; PyTorch's kernels take their statistics in float32 or better."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (None if p is None else p.to(x.dtype) for p in (self.weight, self.bias))
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the whole width (not per head), computed in at least float32."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """(l, C) in any dtype -> (l, C) in at least float32: what comes next, the rotation, wants it so."""
        x = at_least_float32(x)
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class ModulatedNorm(torch.autograd.Function):
    """LayerNorm(x) * (1 + scale) + shift, each token by the row of scale and shift (R, C) that its run names; x (l, C).

    Written out to save x alone for the backward, where autograd would keep the normalised x as well, and so that no
    row's values are ever repeated per token.
    """

    @staticmethod
    def forward(ctx, x: Tensor, shift: Tensor, scale: Tensor, runs: list[tuple[int, int]], eps: float) -> Tensor:
        normed, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], None, None, eps)
        ctx.save_for_backward(x, scale, mean, rstd)
        ctx.runs = runs
        return join(torch.addcmul(shift[r], normed[here], 1 + scale[r]).to(x.dtype) for r, here in spans(runs))

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, scale, mean, rstd = ctx.saved_tensors
        grad_shift = grad_scale = None
        if any(ctx.needs_input_grad[1:3]):  # under adapters the modulation is frozen
            grad_shift, grad_scale = torch.zeros_like(scale), torch.zeros_like(scale)
            for r, here in spans(ctx.runs):
                g = at_least_float32(grad[here])
                grad_shift[r] += g.sum(0)
                grad_scale[r] += ((x[here] - mean[here]) * rstd[here] * g).sum(0)
        normed = join((grad[here] * (1 + scale[r])).to(x.dtype) for r, here in spans(ctx.runs))
        layer_norm_backward = torch.ops.aten.native_layer_norm_backward
        grad_x = layer_norm_backward(normed, x, x.shape[-1:], mean, rstd, None, None, [True, False, False])[0]
        return grad_x, grad_shift, grad_scale, None, None


class GatedAdd(torch.autograd.Function):
    """x + y * gate, each token by its run's row of gate (R, C); x and y (l, C)."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor, gate: Tensor, runs: list[tuple[int, int]]) -> Tensor:
        ctx.save_for_backward(y, gate)
        ctx.runs = runs
        return join(torch.addcmul(x[here], y[here], gate[r]).to(x.dtype) for r, here in spans(runs))

    @staticmethod
    def backward(ctx, grad: Tensor):
        y, gate = ctx.saved_tensors
        grad_gate = torch.zeros_like(gate) if ctx.needs_input_grad[2] else None
        for r, here in spans(ctx.runs) if grad_gate is not None else ():
            grad_gate[r] += (at_least_float32(grad[here]) * y[here]).sum(0)
        return grad, join((grad[here] * gate[r]).to(y.dtype) for r, here in spans(ctx.runs)), grad_gate, None


def spans(runs: list[tuple[int, int]]):
    """(row, slice of this rank's tokens) of each run."""
    start = 0
    for row, count in runs:
        yield row, slice(start, start + count)
        start += count


def join(parts) -> Tensor:
    """Tensors laid end to end; a single one as it is."""
    parts = list(parts)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class SelfAttention(nn.Module):
    def __init__(self, config: WanConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.q, self.k, self.v, self.o = (Linear(config.dim, config.dim) for _ in range(4))
        self.norm_q, self.norm_k = (RMSNorm(config.dim, config.eps) for _ in range(2))

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], pack: Pack) -> Tensor:
        """(l, C) -> (l, C); rope is this rank's part of `rotary_table`."""
        q, k, v = self.norm_q(self.q(x)), self.norm_k(self.k(x)), self.v(x)
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)) for y in (q, k, v))  # (l, H, D)
        q, k = rotate(q, *rope).to(v.dtype), rotate(k, *rope).to(v.dtype)
        return self.o(pack.sp.attention(q, k, v, pack.lengths).flatten(1))


class CrossAttention(nn.Module):
    """Attention to the prompt and, in Wan 2.1's i2v and flf2v, to CLIP features with keys and values of their own."""

    def __init__(self, config: WanConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.q, self.k, self.v, self.o = (Linear(config.dim, config.dim) for _ in range(4))
        self.norm_q, self.norm_k = (RMSNorm(config.dim, config.eps) for _ in range(2))
        if config.reads_clip:
            self.k_img, self.v_img = (Linear(config.dim, config.dim) for _ in range(2))
            self.norm_k_img = RMSNorm(config.dim, config.eps)

    def forward(self, x: Tensor, text: Tensor, image: Tensor | None, pack: Pack) -> Tensor:
        """x (l, C), text (S, T, C), image (S, image tokens, C) or None -> (l, C)."""
        q = self.norm_q(self.q(x)).to(x.dtype)
        out = self.read(q, self.norm_k(self.k(text)), self.v(text), pack)
        if image is not None:
            out = out + self.read(q, self.norm_k_img(self.k_img(image)), self.v_img(image), pack)
        return self.o(out)

    def read(self, q: Tensor, k: Tensor, v: Tensor, pack: Pack) -> Tensor:
        """q (l, C), k and v (S, T, C): each sample's tokens read its own context."""
        lengths = [k.shape[1]] * len(k)
        k, v = k.to(v.dtype).flatten(0, 1), v.flatten(0, 1)  # (S * T, C)
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)) for y in (q, k, v))
        return attend_each(q, k, v, pack.here, lengths).flatten(1)


class Block(nn.Module):
    """Self-attention, cross-attention, feed-forward; the first and the last are modulated by the timestep."""

    def __init__(self, config: WanConfig):
        super().__init__()
        dim, self.eps = config.dim, config.eps
        self.self_attn = SelfAttention(config)
        self.norm3 = LayerNorm(dim, config.eps)  # before the cross-attention; norms 1 and 2 have no parameters
        self.cross_attn = CrossAttention(config)
        self.ffn = nn.Sequential(Linear(dim, config.ffn_dim), nn.GELU(approximate="tanh"), Linear(config.ffn_dim, dim))
        self.modulation = nn.Parameter(torch.randn(1, 6, dim) / dim**0.5)
        self.recompute = False  # parallel.py sets it: save only the block's input, run the block again in the backward

    def forward(self, x, time, text, image, rope, pack: Pack) -> Tensor:
        """x (l, C), time (R, 6, C) in at least float32, text (S, T, C), image (S, n, C) or None -> (l, C)."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.body, x, time, text, image, rope, pack, use_reentrant=False)
        return self.body(x, time, text, image, rope, pack)

    def body(self, x, time, text, image, rope, pack: Pack) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.modulation.to(time.dtype) + time).unbind(1)  # (R, C) each
        runs, eps = pack.runs, self.eps
        y = self.self_attn(ModulatedNorm.apply(x, shift1, scale1, runs, eps), rope, pack)
        x = GatedAdd.apply(x, y, gate1, runs)
        x = x + self.cross_attn(self.norm3(x), text, image, pack)
        y = self.ffn(ModulatedNorm.apply(x, shift2, scale2, runs, eps))
        return GatedAdd.apply(x, y, gate2, runs)


class Head(nn.Module):
    """Modulated norm and projection to patches, in at least float32 as in the official code."""

    def __init__(self, config: WanConfig):
        super().__init__()
        self.eps = config.eps
        self.head = Linear(config.dim, math.prod(config.patch_size) * config.out_dim)
        self.modulation = nn.Parameter(torch.randn(1, 2, config.dim) / config.dim**0.5)

    def forward(self, x: Tensor, time: Tensor, pack: Pack) -> Tensor:
        """x (l, C), time (R, C) -> (l, P)."""
        shift, scale = (self.modulation.to(time.dtype) + time.unsqueeze(1)).unbind(1)
        return self.head(ModulatedNorm.apply(at_least_float32(x), shift, scale, pack.runs, self.eps))


class ImageEmbedding(nn.Module):
    """CLIP features to the model's width; flf2v adds a learned position to each token of its two images."""

    def __init__(self, config: WanConfig):
        super().__init__()
        clip_dim = config.clip_dim
        self.proj = nn.Sequential(
            LayerNorm(clip_dim),
            Linear(clip_dim, clip_dim),
            nn.GELU(),
            Linear(clip_dim, config.dim),
            LayerNorm(config.dim),
        )
        self.images = 2 if config.model_type == "flf2v" else 1
        if self.images == 2:
            self.emb_pos = nn.Parameter(torch.zeros(1, 2 * 257, clip_dim))

    def forward(self, image: Tensor) -> Tensor:
        """(S * images, 257, clip_dim) -> (S, images * 257, C)."""
        image = image.unflatten(0, (-1, self.images)).flatten(1, 2)
        return self.proj(image + self.emb_pos.to(image.dtype) if self.images == 2 else image)


class WanDiT(nn.Module):
    """The whole model. The pass runs in the latents' dtype, whatever dtype the weights are kept in."""

    def __init__(self, config: WanConfig):
        super().__init__()
        self.config = config
        dim = config.dim
        self.patch_embedding = nn.Conv3d(config.in_dim, dim, config.patch_size, stride=config.patch_size)
        self.text_embedding = nn.Sequential(Linear(config.text_dim, dim), nn.GELU(approximate="tanh"), Linear(dim, dim))
        self.time_embedding = nn.Sequential(Linear(config.freq_dim, dim), nn.SiLU(), Linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), Linear(dim, 6 * dim))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = Head(config)
        if config.reads_clip:
            self.img_emb = ImageEmbedding(config)
        self.init_weights()

    def init_weights(self):
        """The official initialisation: Xavier, small embeddings, and a zero head, so training starts from output 0."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.patch_embedding.weight.flatten(1))
        for layer in (*self.text_embedding, *self.time_embedding):
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)
        nn.init.zeros_(self.head.head.weight)

    def forward(self, latents, timesteps, text, image=None, condition=None, sp=LOCAL, gather=True):
        """Predict the velocity of every sample of a pack.

        latents    list of (out_dim, F, H, W), of any sizes
        timesteps  list or tensor: per sample a scalar, or (F,) one per latent frame; 0..1000, 1000 = pure noise
        text       list of (n, text_dim) prompt states without padding, n <= text_len
        image      (S, 257, clip_dim) CLIP features of each first image; flf2v: (2 S, ...) first, last, first, last
        condition  list of (channels, F, H, W) that go in behind the latents' channels
        sp         where the tokens live
        gather     True: list of (out_dim, F, H, W). False: this rank's tokens (l, P), padding last, for a loss that
                   each rank takes of its own tokens
        """
        config = self.config
        self.check_inputs(latents, timesteps, text, image, condition)
        device, dtype = latents[0].device, latents[0].dtype
        wide = torch.promote_types(dtype, torch.float32)
        inputs = latents if condition is None else [torch.cat(pair) for pair in zip(latents, condition, strict=True)]
        grids = [grid_of(x.shape, config.patch_size) for x in latents]
        timesteps = [torch.as_tensor(t, device=device).reshape(-1) for t in timesteps]
        pack = layout(grids, [len(t) for t in timesteps], sp)

        rope = rotary_table(grids, config.dim // config.num_heads, device, wide)
        rope = tuple(sp.shard(table) for table in rope)  # (l, D / 2) each
        x = self.embed_patches(sp.shard(torch.cat([patchify(x, config.patch_size) for x in inputs])))  # (l, C)
        time = self.time_embedding(sinusoid(torch.cat(timesteps), config.freq_dim).to(wide))  # (R, C)
        modulation = self.time_projection(time).unflatten(1, (6, -1))  # (R, 6, C)
        # Zero states up to text_len go through the embedding and are attended to: the released weights expect them.
        text = torch.stack([F.pad(t.to(dtype), (0, 0, 0, config.text_len - len(t))) for t in text])
        text = self.text_embedding(text)  # (S, T, C)
        image = self.img_emb(image.to(dtype)) if config.reads_clip else None

        for block in self.blocks:
            x = block(x, modulation, text, image, rope, pack)
        x = self.head(x, time, pack)  # (l, P)
        if not gather:
            return x
        tokens = sp.gather(x)[: sum(pack.lengths)].split(pack.lengths)
        shapes = [(config.out_dim, *x.shape[1:]) for x in latents]
        return [unpatchify(t, shape, config.patch_size) for t, shape in zip(tokens, shapes, strict=True)]

    def embed_patches(self, patches: Tensor) -> Tensor:
        """(l, P) -> (l, C): the official strided convolution as the matrix product that it is."""
        weight = self.patch_embedding.weight.permute(0, 2, 3, 4, 1).flatten(1)  # to patchify's order of values
        return F.linear(patches, weight.to(patches.dtype), self.patch_embedding.bias.to(patches.dtype))

    def check_inputs(self, latents, timesteps, text, image, condition):
        config, S = self.config, len(latents)
        if not (S == len(timesteps) == len(text)) or S == 0:
            raise ValueError(f"{S} latents, {len(timesteps)} timesteps and {len(text)} texts: one of each per sample")
        channels = latents[0].shape[0] + (condition[0].shape[0] if condition is not None else 0)
        if channels != config.in_dim:
            raise ValueError(f"latents and condition have {channels} channels, the model's in_dim is {config.in_dim}")
        for x, t, states in zip(latents, timesteps, text, strict=True):
            n = t.numel() if isinstance(t, Tensor) else 1
            if n not in (1, x.shape[1] // config.patch_size[0]):
                raise ValueError(f"{n} timesteps for {x.shape[1]} latent frames: give one, or one per frame")
            if len(states) > config.text_len or states.shape[1] != config.text_dim:
                raise ValueError(f"text states {tuple(states.shape)}, at most ({config.text_len}, {config.text_dim})")
        if config.reads_clip != (image is not None):
            raise ValueError(
                f"model_type {config.model_type} {'needs' if config.reads_clip else 'takes no'} CLIP image features"
            )
