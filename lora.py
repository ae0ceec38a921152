"""Low-rank adapters: y = W x + b + alpha / r * B (dropout(A x)), with W and b frozen (Hu et al. 2021, section 4.1).

    attach        put adapters beside the linear layers of a model's blocks and freeze all else
    set_keys      say which numbers a dropout of the coming pack strikes: those that its positions say
    merge         add a file's adapters into a model's weights

Shapes: r rank, l tokens of this rank, S samples of the pack, T text tokens, n image tokens, C width of the model.
"""

import hashlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

TARGETS = "q,k,v,o,ffn.0,ffn.2"  # of both attentions, and the feed-forward


class Adapter(NamedTuple):
    """What a LoRA file says of one linear layer, whose weight grows by scale * alpha / r * up @ down; r the rank."""

    down: Tensor  # A, (r, in)
    up: Tensor  # B, (out, r)
    alpha: float  # where a file names none: r


class LoRA(NamedTuple):
    """A LoRA file in official names: adapters by module ("blocks.0.self_attn.q"), and whole differences by parameter
    ("blocks.0.norm3.bias"), which some files carry beside them."""

    adapters: dict[str, Adapter]
    diffs: dict[str, Tensor]


# ---------------------------------------------------------------------------------------------------------------------
# The layer, and putting it in


class LoRALinear(nn.Module):
    """A linear layer with an adapter. Weight and bias are the base layer's own and keep their names; like it, the layer
    computes in its input's dtype. The adapter is kept in float32 at least, however narrow the frozen weight is."""

    def __init__(self, base: nn.Linear, name: str, rank: int, alpha: float, dropout: float):
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.name, self.alpha, self.dropout = name, alpha, dropout
        self.reads, self.hash = rows_of(name), hash32(f"{name}/dropout")
        self.keys = None  # (...), one for each row of the input, see set_keys
        device, dtype = base.weight.device, torch.promote_types(base.weight.dtype, torch.float32)
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features, device=device, dtype=dtype))
        self.lora_B = nn.Parameter(torch.empty(base.out_features, rank, device=device, dtype=dtype))
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        low = F.linear(x, self.lora_A.to(x.dtype)) * (self.alpha / len(self.lora_A))  # (..., r)
        if self.training and self.dropout:
            if self.keys is None:
                raise RuntimeError(f"{self.name} drops out by position: call lora.set_keys before the forward")
            low = low * keep_mask(self.keys, self.hash, low.shape[-1], self.dropout).to(x.dtype) / (1 - self.dropout)
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype)) + F.linear(low, self.lora_B.to(x.dtype))


def attach(model: nn.Module, rank: int, alpha: float, targets: str = TARGETS, dropout: float = 0.0, seed: int = 0):
    """Give every linear layer in the model's blocks whose name ends with one of `targets` (comma-separated, whole
    components: "k" is not "k_img", "cross_attn.k" is not "self_attn.k") an adapter; freeze all other parameters.

    dropout strikes that share of the r numbers between A and B. ValueError for a target that names no layer. Where the
    model is still on the meta device, call `reset_adapters` once it has memory.
    """
    if rank < 1 or not 0 <= dropout < 1:
        raise ValueError(f"the rank {rank} must be at least 1, the dropout {dropout} in [0, 1)")
    linears = {f"blocks.{name}": m for name, m in model.blocks.named_modules() if isinstance(m, nn.Linear)}
    wanted = [target.strip() for target in targets.split(",")]
    for target in wanted:
        if not any(ends_with(name, target) for name in linears):
            raise ValueError(f"no linear layer is named {target!r}; there are {', '.join(kinds(linears))}")
    model.requires_grad_(False)
    for name, base in linears.items():
        if any(ends_with(name, target) for target in wanted):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, LoRALinear(base, name, rank, alpha, dropout))
    reset_adapters(model, seed)


@torch.no_grad()
def reset_adapters(model: nn.Module, seed: int):
    """A uniform in +-1 / sqrt(in), from a generator keyed by (seed, layer), and B zero, so the model starts unchanged.
    The numbers depend on nothing else; a rank that holds part of an adapter takes its rows of the whole."""
    for layer in layers(model):
        rank, width = layer.lora_A.shape
        random = torch.Generator().manual_seed(hash32(f"{seed}/{layer.name}/lora_A"))
        fill(layer.lora_A, (2 * torch.rand(rank, width, generator=random) - 1) / width**0.5)
        nn.init.zeros_(layer.lora_B)


def layers(model: nn.Module) -> list[LoRALinear]:
    return [module for module in model.modules() if isinstance(module, LoRALinear)]


def ends_with(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def kinds(names) -> dict[str, int]:
    """How many names there are of each kind, which is a name without its block's number."""
    counts = {}
    for name in names:
        parts = name.split(".")
        kind = ".".join(parts[2:] if parts[0] == "blocks" else parts)
        counts[kind] = counts.get(kind, 0) + 1
    return counts


# ---------------------------------------------------------------------------------------------------------------------
# Dropout by position. Whether a number is struck is a pure function of (seed, position, layer, token of the sample,
# component): no generator has a state, so neither the cut of the sequence, nor the pack a sample is in, nor a block run
# again in the backward changes the mask.


class DropoutKeys(NamedTuple):
    """32 bits, held in int64, for each row that a layer may read: the sample's position and the token's place in it."""

    tokens: Tensor  # (l,), 0 for padding
    text: Tensor  # (S, T)
    image: Tensor | None  # (S, n)


def dropout_keys(
    seed: int, positions: list[int], lengths: list[int], text_len: int, image_tokens: int, shard
) -> DropoutKeys:
    """The keys of a pack whose samples have `lengths` tokens; shard cuts them as the model cuts the tokens (the seam's
    method). A pack of a blank sample has no position; image_tokens is 0 where the model reads no image."""
    bases = [hash32(f"{seed}/{position}/lora") for position in positions] + [0] * (len(lengths) - len(positions))
    tokens = torch.cat([base ^ mix(torch.arange(n)) for base, n in zip(bases, lengths, strict=True)])
    text, image = (torch.tensor(bases).unsqueeze(1) ^ mix(torch.arange(n)) for n in (text_len, image_tokens))
    return DropoutKeys(shard(tokens), text, image if image_tokens else None)


def set_keys(model: nn.Module, keys: DropoutKeys):
    """Before a pack's forward; they stay for the backward, which may run blocks again."""
    device = model.blocks[0].modulation.device
    keys = DropoutKeys(*(None if x is None else x.to(device, non_blocking=True) for x in keys))
    for layer in layers(model):
        layer.keys = getattr(keys, layer.reads)


def rows_of(name: str) -> str:
    """What a layer's rows are: the keys and values of cross-attention are made of text or image, all else of tokens."""
    if ends_with(name, "cross_attn.k") or ends_with(name, "cross_attn.v"):
        return "text"
    return "image" if ends_with(name, "k_img") or ends_with(name, "v_img") else "tokens"


def keep_mask(keys: Tensor, layer: int, rank: int, dropout: float) -> Tensor:
    """keys (...) -> bool (..., rank), False for the share `dropout` of it. Two hashes: of the row in this layer (by the
    hash of its name), and of that with the component's number."""
    rows = mix(keys ^ layer)
    bits = mix(rows.unsqueeze(-1) ^ torch.arange(rank, device=keys.device))  # uniform in 0 ... 2^32 - 1
    return bits >= round(dropout * 2**32)


def mix(x: Tensor) -> Tensor:
    """Scramble 32 bits, one to one: shift, xor, and an odd factor so small that int64 never overflows (2^59)."""
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B & 0xFFFFFFFF
    return (x >> 16) ^ x


def hash32(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


# ---------------------------------------------------------------------------------------------------------------------
# To and from what files hold


def adapters_of(model: nn.Module, whole: dict[str, Tensor]) -> LoRA:
    """The model's adapters as a file holds them. `whole` is weights.whole_weights of its trainable parameters, or of
    their moving average: whole tensors on rank 0, and nothing elsewhere."""
    names = [layer.name for layer in layers(model) if f"{layer.name}.lora_A" in whole]
    alphas = {layer.name: layer.alpha for layer in layers(model)}
    return LoRA({x: Adapter(whole[f"{x}.lora_A"], whole[f"{x}.lora_B"], alphas[x]) for x in names}, {})


@torch.no_grad()
def adapters_into(model: nn.Module, lora: LoRA):
    """Go on from a file's adapters: `attach` first, with the file's rank, alpha and targets. ValueError where they
    differ, since a part of the file left out is another model."""
    own = {layer.name: layer for layer in layers(model)}
    missing, extra = own.keys() - lora.adapters.keys(), [*(lora.adapters.keys() - own.keys()), *lora.diffs]
    if missing or extra:
        raise ValueError(
            f"the file and --lora-targets differ: without an adapter in the file {kinds(sorted(missing))}, "
            f"without one in the model {kinds(sorted(extra))}"
        )
    for name, layer in own.items():
        down, up, alpha = lora.adapters[name]
        if down.shape != layer.lora_A.shape or up.shape != layer.lora_B.shape or alpha != layer.alpha:
            raise ValueError(
                f"{name} is {tuple(up.shape)} x {tuple(down.shape)} with alpha {alpha} in the file, not "
                f"{tuple(layer.lora_B.shape)} x {tuple(layer.lora_A.shape)} with {layer.alpha}; "
                f"use --lora-rank {len(down)} --lora-alpha {alpha:g}"
            )
    for name, layer in own.items():
        fill(layer.lora_A, lora.adapters[name].down)
        fill(layer.lora_B, lora.adapters[name].up)


@torch.no_grad()
def merge(model: nn.Module, lora: LoRA, scale: float = 1.0) -> dict[str, int]:
    """Add scale times the file's adapters and differences to the model's weights, in place. Every rank calls, each with
    the whole file; a rank adds its rows of sharded weights.

    Returns how many parts of the file, by kind ("cross_attn.k_img.weight"), have no place in this model. ValueError,
    before anything is changed, where none has, or where a shape differs.
    """
    parameters = dict(model.named_parameters())
    parts = [(f"{module}.weight", adapter) for module, adapter in lora.adapters.items()] + list(lora.diffs.items())
    placed = [(name, part) for name, part in parts if name in parameters]
    if not placed:
        raise ValueError(
            f"none of the LoRA's {len(parts)} parts has a place in this model: {kinds(x for x, _ in parts)}"
        )
    for name, part in placed:
        theirs = (len(part.up), *part.down.shape[1:]) if isinstance(part, Adapter) else tuple(part.shape)
        if theirs != tuple(parameters[name].shape):
            raise ValueError(f"the LoRA's {name} is {theirs}, the model's {tuple(parameters[name].shape)}")
    for name, part in placed:
        weight = parameters[name]
        here = my_rows(weight)
        if isinstance(part, Adapter):
            here.copy_(grown(here, part._replace(up=rows_like(weight, part.up)), scale))
        else:
            here.copy_(add_wide(here, rows_like(weight, part), scale))
    return kinds(name for name, _ in parts if name not in parameters)


def grown(weight: Tensor, adapter: Adapter, scale: float) -> Tensor:
    """weight + scale * alpha / r * up @ down, in float32 at least, in the weight's shape, dtype and device."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    up, down = (x.to(weight.device, wide).flatten(1) for x in (adapter.up, adapter.down))
    return add_wide(weight, (up @ down).view_as(weight), scale * adapter.alpha / len(down))


def add_wide(weight: Tensor, change: Tensor, scale: float) -> Tensor:
    wide = torch.promote_types(weight.dtype, torch.float32)
    return torch.add(weight.to(wide), change.to(weight.device, wide), alpha=scale).to(weight.dtype)


def fill(parameter: Tensor, whole: Tensor):
    my_rows(parameter).copy_(rows_like(parameter, whole))


def my_rows(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rows_like(cut: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of `whole`, cut as `cut` is; every rank has the whole, so nothing is sent."""
    if not isinstance(cut, DTensor):
        return whole
    return distribute_tensor(whole.to(cut.device), cut.device_mesh, cut.placements, src_data_rank=None).to_local()
