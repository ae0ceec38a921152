"""The causal video VAEs of Wan: pixels (3, T, H, W) <-> latents (z, F, h, w) with F = 1 + (T - 1)/4.

Letters: S clips side by side, C channels, T frames (of the video, or at the layer in question), F latent frames,
H and W height and width at the layer in question, h and w those of the latents: H/8 and W/8 of the video, in Wan 2.2
H/16 and W/16.

Nothing here looks ahead in time: latent frame 0 sees video frame 0 alone, latent frame f the frames 0 ... 4f. So a clip
goes through in chunks of 1, 4, 4, ... frames (and back, one latent frame at a time), and what a layer must know of the
past is the last two frames of its own input. `Cache` holds those; one is made per clip and handed down, so the modules
keep no state, gradients flow from chunk to chunk, and memory does not grow with T.

A chunk may hold any valid number of frames: the whole clip as one chunk gives the same numbers as the stream.

Wan 2.2 differs in three things: its first and last layer work on patches of 2 x 2 pixels, a shortcut without weights
leads past each stage (`avg_down`, `dup_up`), and the decoder is wider than the encoder.

Parameter names and the order of the layers are those of the official wan/modules/vae2_1.py and vae2_2.py.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class VAEConfig:
    """The official class's arguments, under their official spelling, and the statistics that normalise its latents."""

    latents_mean: tuple[float, ...]  # per latent channel, over the training videos of the VAE
    latents_std: tuple[float, ...]
    dim: int = 96  # channels after the encoder's first convolution
    dec_dim: int | None = None  # channels before the decoder's last convolution; None: dim
    z_dim: int = 16  # latent channels
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)  # channels of each stage, in units of dim
    num_res_blocks: int = 2  # per encoder stage; a decoder stage has one more
    temperal_downsample: tuple[bool, ...] = (False, True, True)  # does the stage's end halve time, as it halves space?
    patch_size: int = 1  # height and width of the patches that the first and the last convolution work on
    is_residual: bool = False  # does a shortcut lead past each stage? (patch_size and this: the names of diffusers)

    @property
    def spatial(self) -> int:
        """Pixels per latent, along height and along width."""
        return self.patch_size * 2 ** (len(self.dim_mult) - 1)

    @property
    def temporal(self) -> int:
        """Video frames per latent frame, after the first."""
        return 2 ** sum(self.temperal_downsample)


VAE_CONFIGS = {
    # The statistics are those of the official wan/modules/vae2_1.py and vae2_2.py.
    "wan2.1": VAEConfig(
        latents_mean=(
            *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
            *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
        ),
        latents_std=(
            *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
            *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
        ),
    ),
    "wan2.2": VAEConfig(
        dim=160,
        dec_dim=256,
        z_dim=48,
        patch_size=2,
        is_residual=True,
        latents_mean=(
            *(-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891),
            *(0.157, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502),
            *(-0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.123, -0.0313, -0.1649, 0.0117, 0.0723),
            *(-0.2839, -0.2083, -0.052, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
        ),
        latents_std=(
            *(0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.499, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901),
            *(0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659),
            *(0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944),
            *(0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.06, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744),
        ),
    ),
    "demo": VAEConfig(latents_mean=(0.0,) * 16, latents_std=(1.0,) * 16, dim=8),
    "demo-2.2": VAEConfig(
        latents_mean=(0.0,) * 48,
        latents_std=(1.0,) * 48,
        dim=12,
        z_dim=48,
        dim_mult=(1, 2, 2, 2),
        num_res_blocks=1,
        patch_size=2,
        is_residual=True,
    ),
}


class Cache(dict):
    """What one clip's stream remembers from chunk to chunk: {layer: last frames of its input (S, C, 1 or 2, H, W)}."""

    first = True  # until the first chunk has passed the whole network


class Streamed:
    """Marks a layer that looks back in time: its forward takes (x, cache) and leaves its history in the cache."""


class Chain(nn.Sequential, Streamed):
    """Layers in a row, numbered as nn.Sequential does."""

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        for layer in self:
            x = layer(x, cache) if isinstance(layer, Streamed) else layer(x)
        return x


class CausalConv3d(nn.Conv3d, Streamed):
    """A convolution whose window in time ends at the frame it computes; before the clip's start lie zeros."""

    def __init__(self, in_dim: int, out_dim: int, kernel: tuple[int, int, int]):
        super().__init__(in_dim, out_dim, kernel, padding=(0, kernel[1] // 2, kernel[2] // 2))
        self.past = kernel[0] - 1  # frames of history that the window reaches back

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        """x (S, C, T, H, W) -> (S, C', T, H, W)."""
        if self.past == 0:
            return super().forward(x)
        history = cache.get(self)
        if history is None:
            x = F.pad(x, (0, 0, 0, 0, self.past, 0))  # (S, C, past + T, H, W)
        else:
            x = torch.cat([history, x], 2)
        cache[self] = x[:, :, -self.past :].clone()  # a view would keep the whole chunk alive
        return super().forward(x)


class RMSNorm(nn.Module):
    """Divides each pixel's channels by their root mean square; `shape` is the official scale's, (C, 1, 1[, 1])."""

    def __init__(self, *shape: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = self.gamma * len(self.gamma) ** 0.5
        return (F.normalize(exact, dim=1) * scale).to(x.dtype)


class ResidualBlock(nn.Module, Streamed):
    def __init__(self, in_dim: int, out_dim: int):
        super().__init__()
        self.residual = Chain(
            RMSNorm(in_dim, 1, 1, 1),
            nn.SiLU(),
            CausalConv3d(in_dim, out_dim, (3, 3, 3)),
            RMSNorm(out_dim, 1, 1, 1),
            nn.SiLU(),
            nn.Identity(),  # the official dropout, 0 in every release; it holds the number of the next layer
            CausalConv3d(out_dim, out_dim, (3, 3, 3)),
        )
        self.shortcut = nn.Identity() if in_dim == out_dim else nn.Conv3d(in_dim, out_dim, 1)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        return self.shortcut(x) + self.residual(x, cache)


class AttentionBlock(nn.Module):
    """Self-attention with one head among the pixels of a frame; frames do not meet, so it needs no history."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm = RMSNorm(dim, 1, 1)
        self.to_qkv = nn.Conv2d(dim, 3 * dim, 1)
        self.proj = nn.Conv2d(dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        frames = to_frames(x)  # (S T, C, H, W)
        qkv = self.to_qkv(self.norm(frames)).flatten(2)  # (S T, 3C, H W)
        q, k, v = qkv.mT.unsqueeze(1).chunk(3, dim=-1)  # (S T, 1, H W, C) each
        out = F.scaled_dot_product_attention(q, k, v)[:, 0].mT  # (S T, C, H W)
        return x + to_clips(self.proj(out.reshape(frames.shape)), len(x))


class Downsample(nn.Module, Streamed):
    """Halves height and width, and time where `time` says so: 1 + 2n frames of a clip's start become 1 + n."""

    def __init__(self, dim: int, time: bool):
        super().__init__()
        self.resample = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(dim, dim, 3, stride=2))
        self.time_conv = nn.Conv3d(dim, dim, (3, 1, 1), stride=(2, 1, 1)) if time else None

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        """x (S, C, T, H, W) -> (S, C, T/2 or T, H/2, W/2); in the first chunk (T + 1)/2."""
        x = to_clips(self.resample(to_frames(x)), len(x))
        if self.time_conv is None:
            return x
        # The clip's first frame stays as it is. From then on a window of three frames moves on by two, so it shares
        # its first frame with the window before.
        shared = cache.get(self)
        cache[self] = x[:, :, -1:].clone()
        if shared is not None:
            return self.time_conv(torch.cat([shared, x], 2))
        if x.shape[2] == 1:
            return x
        return torch.cat([x[:, :, :1], self.time_conv(x)], 2)


class Upsample(nn.Module, Streamed):
    """Doubles height and width, and time where `time` says so: 1 + n frames of a clip's start become 1 + 2n."""

    def __init__(self, dim: int, out_dim: int, time: bool):
        super().__init__()
        self.resample = nn.Sequential(
            nn.Upsample(scale_factor=2, mode="nearest-exact"), nn.Conv2d(dim, out_dim, 3, padding=1)
        )
        self.time_conv = CausalConv3d(dim, 2 * dim, (3, 1, 1)) if time else None

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        """x (S, C, T, H, W) -> (S, C', 2T or T, 2H, 2W); in the first chunk 2T - 1."""
        if self.time_conv is not None:
            # The clip's first frame stays as it is, and the frames behind it do not see it: their history is zeros.
            alone = 1 if cache.first else 0
            if x.shape[2] > alone:
                pairs = self.time_conv(x[:, :, alone:], cache).unflatten(1, (2, -1))  # (S, 2, C, T', H, W)
                doubled = pairs.permute(0, 2, 3, 1, 4, 5).flatten(2, 3)  # (S, C, 2T', H, W)
                x = torch.cat([x[:, :, :alone], doubled], 2) if alone else doubled
        return to_clips(self.resample(to_frames(x)), len(x))


def fold(x: Tensor, time: int, space: int) -> Tensor:
    """Boxes of pixels become channels, in the order channel, frame, row, column:
    (S, C, T, H, W) -> (S, C time space^2, T/time, H/space, W/space)."""
    x = x.unflatten(4, (-1, space)).unflatten(3, (-1, space)).unflatten(2, (-1, time))
    return x.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4)


def unfold(x: Tensor, time: int, space: int) -> Tensor:
    """The inverse of fold: (S, C time space^2, T, H, W) -> (S, C, time T, space H, space W)."""
    x = x.unflatten(1, (-1, time, space, space)).permute(0, 1, 5, 2, 6, 3, 7, 4)
    return x.flatten(6, 7).flatten(4, 5).flatten(2, 3)


def patchify(x: Tensor, size: int) -> Tensor:
    """(S, C, T, H, W) -> (S, C size^2, T, H/size, W/size), in the order channel, column, row: hence the two `mT`."""
    return fold(x.mT, 1, size).mT


def unpatchify(x: Tensor, size: int) -> Tensor:
    """The inverse of patchify: (S, C size^2, T, H, W) -> (S, C, T, size H, size W)."""
    return unfold(x.mT, 1, size).mT


def avg_down(x: Tensor, out_dim: int, time: int, space: int) -> Tensor:
    """The encoder's shortcut (official AvgDown3D): (S, C, T, H, W) -> (S, C', T/time, H/space, W/space).

    Each output channel is the mean of C time space^2 / C' folded ones that lie side by side. With time = 2 the first
    chunk, odd in length, gets a frame of zeros before it.
    """
    x = F.pad(x, (0, 0, 0, 0, -x.shape[2] % time, 0))
    return fold(x, time, space).unflatten(1, (out_dim, -1)).mean(2)


def dup_up(x: Tensor, out_dim: int, time: int, space: int, first: bool) -> Tensor:
    """The decoder's shortcut (official DupUp3D): (S, C, T, H, W) -> (S, C', time T, space H, space W).

    Each channel is repeated C' time space^2 / C times, then unfolded. In the first chunk the clip's first frame comes
    out once and not `time` times.
    """
    x = x.repeat_interleave(out_dim * time * space**2 // x.shape[1], 1)
    return unfold(x, time, space)[:, :, time - 1 if first else 0 :]


class DownStage(nn.Module, Streamed):
    """A stage of Wan 2.2's encoder; its shortcut is avg_down's (out_dim, time, space)."""

    def __init__(self, layers: list[nn.Module], shortcut: tuple[int, int, int]):
        super().__init__()
        self.downsamples = Chain(*layers)
        self.shortcut = shortcut

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        return self.downsamples(x, cache) + avg_down(x, *self.shortcut)


class UpStage(nn.Module, Streamed):
    """A stage of Wan 2.2's decoder; its shortcut is dup_up's (out_dim, time, space), None in the last stage."""

    def __init__(self, layers: list[nn.Module], shortcut: tuple[int, int, int] | None):
        super().__init__()
        self.upsamples = Chain(*layers)
        self.shortcut = shortcut

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        out = self.upsamples(x, cache)
        return out if self.shortcut is None else out + dup_up(x, *self.shortcut, cache.first)


def to_frames(x: Tensor) -> Tensor:
    """(S, C, T, H, W) -> (S T, C, H, W)."""
    return x.transpose(1, 2).flatten(0, 1)


def to_clips(x: Tensor, clips: int) -> Tensor:
    """(S T, C, H, W) -> (S, C, T, H, W)."""
    return x.unflatten(0, (clips, -1)).transpose(1, 2)


def middle(dim: int) -> Chain:
    """The blocks at the coarsest scale, alike in encoder and decoder."""
    return Chain(ResidualBlock(dim, dim), AttentionBlock(dim), ResidualBlock(dim, dim))


def head(dim: int, out_dim: int) -> Chain:
    return Chain(RMSNorm(dim, 1, 1, 1), nn.SiLU(), CausalConv3d(dim, out_dim, (3, 3, 3)))


def down_stages(config: VAEConfig) -> Chain:
    """The encoder's stages, finest first; every one but the last ends by halving."""
    dims = [config.dim * mult for mult in (1, *config.dim_mult)]
    layers = []
    for i, (in_dim, out_dim) in enumerate(zip(dims, dims[1:], strict=False)):
        stage = [ResidualBlock(in_dim if n == 0 else out_dim, out_dim) for n in range(config.num_res_blocks)]
        shortcut = out_dim, 1, 1
        if i < len(config.dim_mult) - 1:
            time = config.temperal_downsample[i]
            stage.append(Downsample(out_dim, time))
            shortcut = out_dim, 2 if time else 1, 2
        layers += [DownStage(stage, shortcut)] if config.is_residual else stage
    return Chain(*layers)


def up_stages(config: VAEConfig, dim: int) -> Chain:
    """The decoder's stages, coarsest first; every one but the last ends by doubling, which in Wan 2.1 also halves the
    channels. `dim` is what dim_mult multiplies."""
    dims = [dim * mult for mult in config.dim_mult[::-1]]
    layers, in_dim = [], dims[0]
    for i, out_dim in enumerate(dims):
        stage = [ResidualBlock(in_dim if n == 0 else out_dim, out_dim) for n in range(config.num_res_blocks + 1)]
        in_dim = out_dim if config.is_residual else out_dim // 2  # of the next stage
        shortcut = None
        if i < len(dims) - 1:
            time = config.temperal_downsample[::-1][i]
            stage.append(Upsample(out_dim, in_dim, time))
            shortcut = out_dim, 2 if time else 1, 2
        layers += [UpStage(stage, shortcut)] if config.is_residual else stage
    return Chain(*layers)


class Encoder3d(nn.Module):
    def __init__(self, config: VAEConfig):
        super().__init__()
        coarsest = config.dim * config.dim_mult[-1]
        self.patch_size = config.patch_size
        self.conv1 = CausalConv3d(3 * config.patch_size**2, config.dim, (3, 3, 3))
        self.downsamples = down_stages(config)
        self.middle = middle(coarsest)
        self.head = head(coarsest, 2 * config.z_dim)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        """The next frames (S, 3, T, H, W) -> (S, 2z, F, h, w); a cache's first call takes T = 4n + 1, the others 4n."""
        x = self.conv1(patchify(x, self.patch_size), cache)  # (S, C, T, H, W)
        x = self.downsamples(x, cache)  # (S, C, F, h, w)
        x = self.head(self.middle(x, cache), cache)  # (S, 2z, F, h, w)
        cache.first = False
        return x


class Decoder3d(nn.Module):
    def __init__(self, config: VAEConfig):
        super().__init__()
        dim = config.dec_dim or config.dim
        coarsest = dim * config.dim_mult[-1]
        self.patch_size = config.patch_size
        self.conv1 = CausalConv3d(config.z_dim, coarsest, (3, 3, 3))
        self.middle = middle(coarsest)
        self.upsamples = up_stages(config, dim)
        self.head = head(dim * config.dim_mult[0], 3 * config.patch_size**2)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        """The next latent frames (S, z, F, h, w) -> (S, 3, T, H, W); T = 4F - 3 in a cache's first call, then 4F."""
        x = self.conv1(x, cache)  # (S, C, F, h, w)
        x = self.upsamples(self.middle(x, cache), cache)  # (S, C, T, H, W)
        x = unpatchify(self.head(x, cache), self.patch_size)  # (S, 3, T, H, W)
        cache.first = False
        return x


class WanVAE(nn.Module):
    """Encoder, decoder and the statistics between them. Every method takes one clip, or S of one size side by side (a
    leading dimension S); it computes in the weights' dtype and returns at least float32."""

    def __init__(self, config: VAEConfig):
        super().__init__()
        self.config = config
        self.spatial = config.spatial
        self.temporal = config.temporal
        self.encoder = Encoder3d(config)
        self.conv1 = nn.Conv3d(2 * config.z_dim, 2 * config.z_dim, 1)  # behind the encoder
        self.conv2 = nn.Conv3d(config.z_dim, config.z_dim, 1)  # before the decoder
        self.decoder = Decoder3d(config)

    def latent_frames(self, frames: int) -> int:
        """F of a clip of T frames; ValueError where T is not 1, 5, 9, ..."""
        below = (frames - 1) // self.temporal * self.temporal + 1
        if frames < 1 or frames != below:
            nearest = "1" if frames < 1 else f"{below} or {below + self.temporal}"
            raise ValueError(f"a clip has {self.temporal}n + 1 frames, not {frames}; the nearest is {nearest}")
        return 1 + (frames - 1) // self.temporal

    def check_size(self, height: int, width: int) -> None:
        """ValueError where the VAE would have to cut or pad the picture."""
        for name, size in (("height", height), ("width", width)):
            if size % self.spatial or size < self.spatial:
                below = size // self.spatial * self.spatial
                nearest = f"{below} or {below + self.spatial}" if below else f"{self.spatial}"
                raise ValueError(f"the {name} must be a multiple of {self.spatial}, not {size}; nearest is {nearest}")

    def encode(self, video: Tensor) -> Tensor:
        """Video (3, T, H, W) in [-1, 1] -> normalised mean latents (z, F, h, w)."""
        self.latent_frames(video.shape[-3])
        return torch.cat(list(self.encode_stream(video)), -3)

    def decode(self, latents: Tensor) -> Tensor:
        """Normalised latents (z, F, h, w) -> video (3, 4F - 3, H, W), not clamped to [-1, 1]."""
        return torch.cat(list(self.decode_stream(latents)), -3)

    def posterior(self, video: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance (z, F, h, w) of the latents as the encoder gives them, not normalised."""
        self.latent_frames(video.shape[-3])
        mean, log_variance = zip(*self._posteriors(video), strict=True)
        return torch.cat(mean, -3), torch.cat(log_variance, -3)

    def encode_stream(self, chunks: Tensor | Iterable[Tensor]) -> Iterator[Tensor]:
        """`encode`, for frames that arrive as chunks (3, any t, H, W): yields latents (z, 1, h, w). Whether the frames
        add up to 4n + 1 shows at the end only, so a ValueError comes after the last whole latent frame."""
        mean, std = self._statistics()
        for posterior_mean, _ in self._posteriors(chunks):
            yield (posterior_mean - mean.to(posterior_mean)) / std.to(posterior_mean)

    def decode_stream(self, latents: Tensor | Iterable[Tensor]) -> Iterator[Tensor]:
        """`decode`, for latents in chunks (z, any f, h, w): yields video of 1, 4, 4, ... frames."""
        mean, std = self._statistics()
        cache = Cache()
        for chunk in [latents] if isinstance(latents, Tensor) else latents:
            chunk = chunk.to(torch.promote_types(chunk.dtype, torch.float32))
            for z in (chunk * std.to(chunk) + mean.to(chunk)).split(1, -3):
                z = z.to(self.conv2.weight.dtype)
                video = self.decoder(self.conv2(z if z.ndim == 5 else z[None]), cache)
                video = video.to(torch.promote_types(video.dtype, torch.float32))
                yield video if z.ndim == 5 else video[0]

    def _posteriors(self, chunks: Tensor | Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Frames in chunks (3, any t, H, W) -> (mean, log-variance) of one latent frame after the other."""
        cache = Cache()
        for x in self._regroup([chunks] if isinstance(chunks, Tensor) else chunks):
            self.check_size(*x.shape[-2:])
            x = x.to(self.conv1.weight.dtype)
            out = self.conv1(self.encoder(x if x.ndim == 5 else x[None], cache))  # (S, 2z, 1, h, w)
            out = out.to(torch.promote_types(out.dtype, torch.float32))
            yield (out if x.ndim == 5 else out[0]).chunk(2, -4)

    def _regroup(self, chunks: Iterable[Tensor]) -> Iterator[Tensor]:
        """Chunks of any length -> chunks of 1, 4, 4, ... frames; ValueError where the last one stays short."""
        held, need, frames = None, 1, 0
        for chunk in chunks:
            frames += chunk.shape[-3]
            held = chunk if held is None or held.shape[-3] == 0 else torch.cat([held, chunk], -3)
            while held.shape[-3] >= need:
                yield held.narrow(-3, 0, need)
                held = held.narrow(-3, need, held.shape[-3] - need)
                need = self.temporal
        self.latent_frames(frames)

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the latents, (z, 1, 1, 1), in float64."""
        both = torch.tensor([self.config.latents_mean, self.config.latents_std], dtype=torch.float64)
        return tuple(both[:, :, None, None, None])
