"""Low-rank adapters: W x + scale * alpha / rank * B (A x), with W frozen (Hu et al. 2021)."""

from typing import NamedTuple

from torch import Tensor


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
