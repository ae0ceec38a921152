"""umT5: from a prompt to the states that the DiT attends to.

clean_prompt -> Tokenizer -> UMT5Encoder, and encode_prompts for the three together. The encoder has the official
checkpoint's parameter names (models_t5_umt5-xxl-enc), so its weights load without a map. Unlike T5, umT5 gives each
layer its own table of relative-position biases; like T5, it does not scale the attention logits.

Letters: S prompts, L tokens of the longest, C width, H heads, D head dim.
"""

import html
import math
import re
from dataclasses import dataclass
from pathlib import Path

import ftfy
import sentencepiece
import torch
from torch import nn

MAX_DISTANCE = 128  # relative positions from here on share the last bucket
PAD, EOS = 0, 1  # umT5's ids; the padding id must be 0 because the official pipeline pads so


@dataclass(frozen=True)
class UMT5Config:
    """Field names and meaning as in the official T5Encoder; the xxl values come from its checkpoint."""

    vocab: int = 256384
    dim: int = 4096
    dim_attn: int = 4096
    dim_ffn: int = 10240
    num_heads: int = 64
    num_layers: int = 24
    num_buckets: int = 32

    def __post_init__(self):
        if self.dim_attn % self.num_heads:
            raise ValueError(f"dim_attn {self.dim_attn} does not split into {self.num_heads} heads")


UMT5_CONFIGS = {
    "umt5-xxl": UMT5Config(),
    "demo": UMT5Config(vocab=128, dim=64, dim_attn=64, dim_ffn=128, num_heads=4, num_layers=2),
}


# --- the encoder ----------------------------------------------------------------------------------------------------


def relative_buckets(length: int, num_buckets: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Bucket of key position - query position, (L, L) long with the queries first.

    Half of the buckets are for keys behind the query, half for those ahead. In each half the nearest distances have a
    bucket of their own, and from num_buckets / 4 on the buckets widen logarithmically up to MAX_DISTANCE (T5 paper,
    section 2.1).
    """
    half = num_buckets // 2
    exact = half // 2
    position = torch.arange(length, device=device)
    offset = position[None, :] - position[:, None]  # (L, L)
    distance = offset.abs()
    octave = torch.log(distance.clamp(min=exact).to(torch.float64) / exact) / math.log(MAX_DISTANCE / exact)
    far = (exact + (octave * (half - exact)).to(torch.long)).clamp(max=half - 1)
    return torch.where(distance < exact, distance, far) + half * (offset > 0)


class RMSNorm(nn.Module):
    """x / rms(x) * weight: the rms in at least float32, the product in x's dtype."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


class Attention(nn.Module):
    """Self-attention with a bias per head and relative position, logits not divided by sqrt(D)."""

    def __init__(self, config: UMT5Config):
        super().__init__()
        self.num_heads = config.num_heads
        self.q = nn.Linear(config.dim, config.dim_attn, bias=False)
        self.k = nn.Linear(config.dim, config.dim_attn, bias=False)
        self.v = nn.Linear(config.dim, config.dim_attn, bias=False)
        self.o = nn.Linear(config.dim_attn, config.dim, bias=False)

    def forward(self, x: torch.Tensor, bias: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        """x (S, L, C), bias (H, L, L), padding (S, 1, 1, L) true where a key is not to be seen -> (S, L, C)."""
        q, k, v = (
            linear(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (S, H, L, D)
            for linear in (self.q, self.k, self.v)
        )
        logits = q @ k.transpose(-1, -2) + bias  # (S, H, L, L)
        if padding is not None:
            # The lowest finite number, not -inf: a row of nothing but padding then averages instead of giving NaN.
            logits = logits.masked_fill(padding, torch.finfo(logits.dtype).min)
        wide = torch.promote_types(logits.dtype, torch.float32)
        attended = torch.softmax(logits, -1, dtype=wide).to(v.dtype) @ v  # (S, H, L, D)
        return self.o(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """fc2(gelu(gate(x)) * fc1(x))."""

    def __init__(self, config: UMT5Config):
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(config.dim, config.dim_ffn, bias=False), nn.GELU("tanh"))
        self.fc1 = nn.Linear(config.dim, config.dim_ffn, bias=False)
        self.fc2 = nn.Linear(config.dim_ffn, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.gate(x) * self.fc1(x))


class RelativeBias(nn.Module):
    """One number per bucket and head."""

    def __init__(self, config: UMT5Config):
        super().__init__()
        self.embedding = nn.Embedding(config.num_buckets, config.num_heads)

    def forward(self, buckets: torch.Tensor) -> torch.Tensor:
        return self.embedding(buckets).permute(2, 0, 1)  # (L, L) -> (H, L, L), shared by all prompts


class Block(nn.Module):
    def __init__(self, config: UMT5Config):
        super().__init__()
        self.norm1 = RMSNorm(config.dim)
        self.attn = Attention(config)
        self.norm2 = RMSNorm(config.dim)
        self.ffn = FeedForward(config)
        self.pos_embedding = RelativeBias(config)

    def forward(self, x: torch.Tensor, buckets: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), self.pos_embedding(buckets), padding)
        return x + self.ffn(self.norm2(x))


class UMT5Encoder(nn.Module):
    """ids (S, L) long, mask (S, L), nonzero where a token is real -> states (S, L, C).

    States of padding are computed and mean nothing; encode_prompts cuts them off. Made for bfloat16, float32 and
    float64: in float16 the residual stream overflows with the released weights.
    """

    def __init__(self, config: UMT5Config):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """T5's initialisation: unit variance along the network, with the missing 1 / sqrt(D) folded into q."""
        c = self.config
        nn.init.normal_(self.token_embedding.weight)
        for block in self.blocks:
            nn.init.normal_(block.attn.q.weight, std=(c.dim * c.dim_attn // c.num_heads) ** -0.5)
            nn.init.normal_(block.pos_embedding.embedding.weight, std=c.dim**-0.5)
            attn, ffn = block.attn, block.ffn
            for linear in (attn.k, attn.v, attn.o, ffn.gate[0], ffn.fc1, ffn.fc2):
                nn.init.normal_(linear.weight, std=linear.in_features**-0.5)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if ids.numel() and (ids.max() >= self.config.vocab or ids.min() < 0):
            worst = ids.max().item() if ids.max() >= self.config.vocab else ids.min().item()
            message = f"token id {worst} is outside the text encoder's vocabulary of {self.config.vocab}"
            raise ValueError(message + ": --tokenizer and --text-encoder do not belong together")
        padding = None if mask is None else (mask == 0)[:, None, None, :]  # (S, 1, 1, L)
        buckets = relative_buckets(ids.shape[1], self.config.num_buckets, ids.device)
        x = self.token_embedding(ids)  # (S, L, C)
        for block in self.blocks:
            x = block(x, buckets, padding)
        return self.norm(x)


# --- prompts --------------------------------------------------------------------------------------------------------


def clean_prompt(text: str) -> str:
    """Repairs broken encodings, resolves HTML entities, makes every run of white space one space.

    As the official pipelines clean ("whitespace" in their HuggingfaceTokenizer). Entities are resolved twice because
    scraped captions are often escaped twice.
    """
    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", text).strip()


class Tokenizer:
    """prompts -> ids (S, text_len) long and mask (S, text_len) long, 1 for real tokens.

    path is a SentencePiece model, or a folder with a spiece.model (as in the released google/umt5-xxl). Prompts are
    cleaned; each ends with the end-of-sentence id, also where it had to be cut; the rest is padding, id 0.
    """

    def __init__(self, path: str | Path, text_len: int = 512):
        path = Path(path)
        if path.is_dir():
            path = path / "spiece.model"
        if not path.is_file():
            raise FileNotFoundError(f"no tokenizer at {path}; --tokenizer wants umT5's spiece.model or its folder")
        if text_len < 1:
            raise ValueError(f"text_len {text_len} has no room for the end-of-sentence token")
        self.text_len = text_len
        self.model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        found = self.model.pad_id(), self.model.eos_id()
        if found != (PAD, EOS):
            raise ValueError(f"{path} has pad and eos ids {found}, umT5 has {(PAD, EOS)}: not a umT5 tokenizer")

    @property
    def vocab_size(self) -> int:
        """Pieces in the model; at most the encoder's vocab, which is rounded up."""
        return self.model.vocab_size()

    def __call__(self, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(prompts, str):
            raise TypeError("Tokenizer wants a list of prompts, got a single string")
        ids = torch.full((len(prompts), self.text_len), PAD)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            pieces = self.model.encode(clean_prompt(prompt))[: self.text_len - 1] + [EOS]
            ids[row, : len(pieces)] = torch.tensor(pieces)
            mask[row, : len(pieces)] = 1
        return ids, mask


@torch.no_grad()
def encode_prompts(encoder: UMT5Encoder, tokenizer: Tokenizer, prompts: list[str]) -> list[torch.Tensor]:
    """Each prompt's states (L_i, C), end of sentence included, padding never; the empty prompt has L_i = 1.

    Prompts are encoded one at a time and at their own length, which gives what the padded batch gives up to rounding,
    costs less, and lets no prompt's rounding depend on its neighbours: a cached caption is the same whoever encoded it.
    """
    device = encoder.token_embedding.weight.device
    ids, mask = tokenizer(prompts)
    lengths = mask.sum(1).tolist()
    return [encoder(ids[row : row + 1, :n].to(device))[0] for row, n in enumerate(lengths)]
