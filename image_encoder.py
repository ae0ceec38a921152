"""The CLIP vision tower (ViT-H/14) whose features tell Wan 2.1's I2V and FLF2V models what is in the given picture.

picture -> `preprocess` -> VisionTransformer -> one vector per patch and one for the picture as a whole. Wan reads the
states before the last block (the official use_31_block), not CLIP's embedding; so the last block, the norm behind it
and the projection are there for the checkpoint's sake alone and are never computed.

Letters: n pictures, L = 1 + H/p * W/p tokens (the class token and the patches), C width, A heads, D head dim,
H and W height and width, p patch size.

Parameter names are those of the official wan/modules/clip.py (models_clip_open-clip-xlm-roberta-large-vit-huge-14).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # per colour; CLIP's training set
TEXT_SIDE = ("textual.", "log_scale")  # names in the official checkpoint that Wan has no use for


@dataclass(frozen=True)
class CLIPConfig:
    """Field names as in the official VisionTransformer."""

    image_size: int = 224  # pictures become squares of this many pixels
    patch_size: int = 14
    dim: int = 1280
    mlp_ratio: int = 4
    out_dim: int = 1024  # of CLIP's embedding
    num_heads: int = 16
    num_layers: int = 32
    norm_eps: float = 1e-5

    def __post_init__(self):
        if self.dim % self.num_heads:
            raise ValueError(f"dim {self.dim} does not split into {self.num_heads} heads")
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}")


CLIP_CONFIGS = {
    "vit-h-14": CLIPConfig(),
    "demo": CLIPConfig(image_size=112, patch_size=7, dim=32, out_dim=32, num_heads=2, num_layers=3),  # 257 tokens too
}


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class LayerNorm(nn.LayerNorm):
    """Computes in at least float32, returns x's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        exact = at_least_float32(x)
        weight, bias = self.weight.to(exact.dtype), self.bias.to(exact.dtype)
        return F.layer_norm(exact, self.normalized_shape, weight, bias, self.eps).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.to_qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(n, L, C) -> (n, L, C)."""
        qkv = self.to_qkv(x).unflatten(2, (3, self.num_heads, -1))  # (n, L, 3, A, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (n, A, L, D) each
        out = F.scaled_dot_product_attention(q, k, v)  # (n, A, L, D)
        return self.proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config: CLIPConfig):
        super().__init__()
        dim, hidden = config.dim, config.dim * config.mlp_ratio
        self.norm1 = LayerNorm(dim, config.norm_eps)
        self.attn = Attention(dim, config.num_heads)
        self.norm2 = LayerNorm(dim, config.norm_eps)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, config: CLIPConfig):
        super().__init__()
        self.config = config
        self.grid = config.image_size // config.patch_size  # patches along each side
        scale = config.dim**-0.5
        self.patch_embedding = nn.Conv2d(3, config.dim, config.patch_size, config.patch_size, bias=False)
        self.cls_embedding = nn.Parameter(scale * torch.randn(1, 1, config.dim))
        self.pos_embedding = nn.Parameter(scale * torch.randn(1, 1 + self.grid**2, config.dim))
        self.pre_norm = LayerNorm(config.dim, config.norm_eps)
        self.transformer = nn.Sequential(*(Block(config) for _ in range(config.num_layers)))
        self.post_norm = LayerNorm(config.dim, config.norm_eps)
        self.head = nn.Parameter(scale * torch.randn(config.dim, config.out_dim))

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalised pictures (n, 3, H, W) -> states before the last block (n, L, C), the class token first.

        Any H and W that are multiples of the patch size will do; ValueError for others, whose edges would be lost.
        """
        height, width, size = *pixels.shape[2:], self.config.patch_size
        if height % size or width % size:
            raise ValueError(f"a picture of {height} x {width} pixels does not split into patches of {size} x {size}")
        patches = self.patch_embedding(pixels)  # (n, C, H/p, W/p)
        rows, columns = patches.shape[2:]
        tokens = patches.flatten(2).mT  # (n, L - 1, C)
        x = torch.cat([self.cls_embedding.expand(len(tokens), -1, -1), tokens], 1)  # (n, L, C)
        x = self.pre_norm(x + self.positions(rows, columns))
        return self.transformer[:-1](x)

    def positions(self, rows: int, columns: int) -> Tensor:
        """The learned positions, (1, L, C): bicubically resized where the grid is not the trained one."""
        if (rows, columns) == (self.grid, self.grid):
            return self.pos_embedding
        cls, patches = self.pos_embedding.split([1, self.grid**2], 1)
        grid = at_least_float32(patches).mT.unflatten(2, (self.grid, self.grid))  # (1, C, grid, grid)
        resized = F.interpolate(grid, (rows, columns), mode="bicubic", align_corners=False)  # (1, C, rows, columns)
        return torch.cat([cls, resized.flatten(2).mT.to(cls.dtype)], 1)


class CLIPVision(nn.Module):
    """The tower with its preprocessing; computes in the weights' dtype and returns at least float32."""

    def __init__(self, config: CLIPConfig):
        super().__init__()
        self.config = config
        self.visual = VisionTransformer(config)

    def load_official(self, state: Mapping[str, Tensor]) -> list[str]:
        """Load all `visual.*` weights of the official checkpoint, strictly (RuntimeError names what differs). Its text
        encoder and log_scale are left out; returns their names."""
        self.load_state_dict({name: tensor for name, tensor in state.items() if not name.startswith(TEXT_SIDE)})
        return [name for name in state if name.startswith(TEXT_SIDE)]

    def preprocess(self, videos: list[Tensor]) -> Tensor:
        """Each frame of videos (3, T, H, W) in [-1, 1], of any sizes -> normalised squares (n, 3, size, size).

        As in the official pipeline a picture is squashed into the square, not cropped, and resized bicubically without
        antialiasing: the features of a big picture depend on that.
        """
        size = (self.config.image_size,) * 2
        frames = [at_least_float32(video).transpose(0, 1) for video in videos]  # (T, 3, H, W) each
        frames = [F.interpolate(x, size, mode="bicubic", align_corners=False) for x in frames]  # (T, 3, size, size)
        pixels = torch.cat(frames) * 0.5 + 0.5  # in [0, 1]
        mean, std = pixels.new_tensor([MEAN, STD])[:, :, None, None]  # (3, 1, 1) each
        return (pixels - mean) / std

    def encode(self, videos: list[Tensor]) -> Tensor:
        """Pictures (3, 1, H, W) in [-1, 1], of any sizes -> features (n, 257, 1280). FLF2V wants each sample's first
        picture followed by its last."""
        return self(self.preprocess(videos))

    def forward(self, pixels: Tensor) -> Tensor:
        """Preprocessed pictures (n, 3, size, size) -> features (n, L, C)."""
        return at_least_float32(self.visual(pixels.to(self.visual.head.dtype)))
