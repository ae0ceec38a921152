"""The VAE on frames too large for the device: in overlapping tiles, one after the other.

Decoding 720 x 1280 with the Wan 2.1 VAE in float32 holds 8 GiB of history (the two last frames of every layer's input)
and activations of 2.6 GiB each; a tile of 256 x 256 pixels holds 0.6 and 0.2. Tiles are cut in space alone: in time the
VAE is streamed already, without a seam. A tile goes through the whole clip before the next begins. To take turns frame
by frame would keep the history of all tiles, more than that of the whole frame; the result, which this way has to be
there as a whole, is small beside it.

Letters as in vae.py; a cell is the square of pixels behind one latent, 8 x 8 or in Wan 2.2 16 x 16.
"""

from itertools import product

import torch
from torch import Tensor

from vae import VAEConfig, WanVAE

MIN_TILE = 8  # cells; below, the borders that a tile does not see past are most of it


class TiledVAE(WanVAE):
    """A WanVAE, with its weights, whose `encode` and `decode` work in tiles of `tile` x `tile` cells that overlap by
    `overlap` cells or more, blended linearly. A frame that fits into a tile comes out as WanVAE's, to the bit.

    What lies beyond a tile is unknown in it, to the attention of the coarsest layers too, so the result differs from
    the whole frame's, least of all in the middle of a tile; larger tiles come closer. The streams and `posterior` are
    WanVAE's and not tiled.
    """

    def __init__(self, config: VAEConfig, tile: int = 32, overlap: int = 8):
        super().__init__(config)
        if tile < MIN_TILE:
            raise ValueError(f"--vae-tile {tile} is smaller than {MIN_TILE} cells of {self.spatial} pixels")
        if not 1 <= overlap <= tile // 2:
            raise ValueError(f"--vae-overlap {overlap} is not in 1 ... {tile // 2}, half of --vae-tile {tile}")
        self.tile, self.overlap = tile, overlap

    def extra_repr(self) -> str:
        return f"tile={self.tile}, overlap={self.overlap}"

    def encode(self, video: Tensor) -> Tensor:
        """Video (3, T, H, W) in [-1, 1] -> normalised mean latents (z, F, h, w)."""
        self.check_size(*video.shape[-2:])
        return self._blend(self.encode_stream, video, self.latent_frames(video.shape[-3]), self.spatial, 1)

    def decode(self, latents: Tensor) -> Tensor:
        """Normalised latents (z, F, h, w) -> video (3, 4F - 3, H, W), not clamped to [-1, 1]."""
        frames = 1 + (latents.shape[-3] - 1) * self.temporal
        return self._blend(self.decode_stream, latents, frames, 1, self.spatial)

    def _blend(self, stream, x: Tensor, frames: int, cell_in: int, cell_out: int) -> Tensor:
        """stream(tile) of every tile of x, put together; cells are cell_in pixels of x, cell_out of the result wide."""
        height, width = (size // cell_in for size in x.shape[-2:])
        tall, wide = min(self.tile, height), min(self.tile, width)
        rows, columns = cuts(height, tall, self.overlap, cell_out), cuts(width, wide, self.overlap, cell_out)
        out = None
        for (top, down), (left, across) in product(rows, columns):
            tile = x.narrow(-2, top * cell_in, tall * cell_in).narrow(-1, left * cell_in, wide * cell_in)
            done = 0
            for part in stream(tile):  # (..., C, t, tile, tile)
                if out is None:
                    out = part.new_zeros(*part.shape[:-3], frames, height * cell_out, width * cell_out)
                weight = down.to(part)[:, None] * across.to(part)
                place = out.narrow(-3, done, part.shape[-3]).narrow(-2, top * cell_out, tall * cell_out)
                place.narrow(-1, left * cell_out, wide * cell_out).add_(part * weight)
                done += part.shape[-3]
        return out


def cuts(size: int, tile: int, overlap: int, cell: int) -> list[tuple[int, Tensor]]:
    """(start, weights) of tiles that cover `size` cells along one axis, as few as overlap by `overlap` or more.

    They are of equal size and evenly spread. A tile's weights (tile * cell,) in float64 fall linearly over the overlap
    towards both its borders, and are scaled so that at each pixel those of all tiles add up to 1; so at the frame's
    own borders, where there is no other tile, they are 1.
    """
    count = 1 if tile == size else -(-(size - overlap) // (tile - overlap))
    starts = [round(i * (size - tile) / max(count - 1, 1)) for i in range(count)]
    pixel = torch.arange(tile * cell, dtype=torch.float64) + 0.5
    ramp = torch.minimum(pixel, pixel.flip(0)).clamp(max=overlap * cell)
    total = torch.zeros(size * cell, dtype=torch.float64)
    spans = [slice(start * cell, (start + tile) * cell) for start in starts]
    for span in spans:
        total[span] += ramp
    return [(start, ramp / total[span]) for start, span in zip(starts, spans, strict=True)]
