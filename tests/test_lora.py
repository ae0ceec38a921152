"""Adapters: against hand arithmetic, PEFT and autograd; and that training them does not depend on the layout."""

import math
import os
from unittest.mock import patch

import pytest
import torch
from runs import distance, whole
from spawn import spawn
from torch.distributed.tensor import DTensor

import lora
import parallel
import stream
from lora import Adapter, LoRA
from model import WanConfig, WanDiT, patchify
from weights import whole_weights

# Reads a condition and CLIP features, so that each kind of row (tokens, text, image) has an adapter.
TINY = WanConfig(
    "i2v", dim=48, ffn_dim=80, num_heads=4, num_layers=2, in_dim=20, text_dim=8, text_len=5, freq_dim=16, clip_dim=12
)
TARGETS = "q,k,v,o,ffn.0,ffn.2,k_img,v_img"
SIZES = [(3, 4, 6), (1, 2, 10), (2, 6, 6), (1, 2, 2)]  # latent frames, height, width: 18 + 5 + 18 + 1 tokens
B = len(SIZES)


def tiny(dtype=torch.float64) -> WanDiT:
    torch.manual_seed(0)
    model = WanDiT(TINY)
    torch.nn.init.normal_(model.head.head.weight, std=0.1)  # a zero head sends no gradient into the blocks
    return model.to(dtype)


def with_adapters(model: WanDiT, dropout=0.3, rank=3) -> WanDiT:
    """B is not zero, as it would be at the start: else A has no gradient and dropout no effect."""
    lora.attach(model, rank=rank, alpha=5.0, targets=TARGETS, dropout=dropout, seed=1)
    torch.manual_seed(2)
    with torch.no_grad():
        for layer in lora.layers(model):
            layer.lora_B.normal_(std=0.3)
    return model


def sample(position: int):
    """The latents, target, timestep, text, condition and CLIP features at a position."""
    generator = torch.Generator().manual_seed(position)
    size = SIZES[position % B]

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sigma = torch.rand(1, generator=generator, dtype=torch.float64)
    text = normal(1 + position % 5, TINY.text_dim)
    return normal(16, *size), normal(16, *size), 1000 * sigma, text, normal(4, *size), normal(1, 257, TINY.clip_dim)


def pack_loss(model, positions: list[int], layout, dtype, shard_keys=None) -> torch.Tensor:
    """This rank's share of the mean over the B samples of each one's mean squared error."""
    samples, sp = [sample(p) for p in positions], layout.seam()
    weights = [1 / (B * x[0].numel())] * len(positions) if False else [1 / (B * x[0].numel()) for x in samples]
    if not samples:  # nothing left for this rank: a blank token of weight zero
        blank = torch.zeros(16, 1, 2, 2, dtype=torch.float64)
        samples = [(blank, blank, torch.zeros(1), torch.zeros(1, 8), blank[:4], torch.zeros(1, 257, TINY.clip_dim))]
        weights = [0.0]
    latents, targets, timesteps, text, condition, image = zip(*samples, strict=True)
    targets = [patchify(x, TINY.patch_size) for x in targets]
    lengths = [len(x) for x in targets]
    weight = torch.cat([torch.full((n,), w, dtype=torch.float64) for n, w in zip(lengths, weights, strict=True)])
    inner = getattr(model, "module", model)
    keys = lora.dropout_keys(7, positions, lengths, TINY.text_len, 257, shard_keys or sp.shard)
    lora.set_keys(inner, keys)
    latents, text, condition = ([x.to(dtype) for x in tensors] for tensors in (latents, text, condition))
    out = model(latents, timesteps, text, torch.cat(image).to(dtype), condition, sp=sp, gather=False)
    error = out.to(torch.promote_types(dtype, torch.float32)) - sp.shard(torch.cat(targets))
    return (error.square().sum(1) * sp.shard(weight)).sum()


def train(
    ulysses=1, ring=1, shard="none", pack_tokens=0, recompute="none", precision="fp64", trainable="", fault=""
) -> dict:
    """Two steps; losses, whole gradients and what was trained, and what was not. Without `trainable`, of adapters."""
    layout = parallel.start(ulysses, ring)
    dtype = {"fp64": torch.float64, "bf16": torch.bfloat16}[precision]
    model = tiny(torch.promote_types(dtype, torch.float32))
    if trainable:
        freeze(model, trainable)
    else:
        with_adapters(model)
    wrapped = parallel.parallelize(model, layout, shard, precision, recompute, compile=False)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=0.01)
    record = {
        "loss": [],
        "grads": [],
        "norm": [],
        "frozen": whole(frozen),
        "dtypes": {p.dtype for p in frozen.values()},
    }
    lengths = [math.prod(size) // 4 for size in SIZES]
    for step in range(2):
        packs = stream.assign_packs(lengths, lengths, layout.dp, pack_tokens * layout.sp)[layout.dp_rank]
        total = torch.zeros((), dtype=torch.float64)
        for i, pack in enumerate(packs):
            with parallel.synchronize(wrapped, last=i == len(packs) - 1):
                cut = local_index(layout) if fault == "local index" else None
                loss = pack_loss(wrapped, [step * B + j for j in pack], layout, dtype, cut)
                loss.backward()
            total += loss.detach()
        record["loss"].append(layout.sum(total).item())
        record["grads"].append(whole({name: p.grad for name, p in trained.items()}))
        record["norm"].append(parallel.clip_gradients(list(trained.values()), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    left = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    record["params"], record["left"] = whole({name: p.detach() for name, p in trained.items()}), whole(left)
    return record


def freeze(model, pattern: str):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in pattern.split("|")))


def local_index(layout):
    """A fault: the mask of a token depends on its place on this rank."""
    seam = layout.seam()
    return lambda x: x[: len(seam.shard(x))]


def averaged(_, bucket):
    """A fault: gradients divided by the world, as DDP's own."""
    bucket.buffer().div_(torch.distributed.get_world_size())
    return sum_gradients(_, bucket)


sum_gradients = parallel.sum_gradients


def train_all(cases: list[dict]) -> list[dict]:
    records = []
    for case in cases:
        hook = averaged if case.get("fault") == "averaged" else sum_gradients
        with patch.object(parallel, "sum_gradients", hook):
            records.append(train(**case))
    return records


def worst(record: dict, reference: dict) -> float:
    """The largest relative difference of a loss, a gradient norm, a gradient or a trained parameter."""
    numbers = [
        abs(a - b) / abs(b) for key in ("loss", "norm") for a, b in zip(record[key], reference[key], strict=True)
    ]
    pairs = [*zip(record["grads"], reference["grads"], strict=True), (record["params"], reference["params"])]
    assert all(a.keys() == b.keys() for a, b in pairs)
    return max(numbers + [distance(a[name], b[name]) for a, b in pairs for name in b])


LAYOUTS = {
    2: [
        {"shard": "full", "recompute": "block"},
        {"shard": "none", "pack_tokens": 18},
        {"ulysses": 2, "shard": "grads"},
        {"ring": 2, "shard": "none", "recompute": "block", "pack_tokens": 10},
    ],
    4: [
        {"shard": "grads", "recompute": "block"},
        {"ulysses": 2, "shard": "none", "pack_tokens": 9},
        {"ring": 2, "shard": "full", "pack_tokens": 10},
        {"ulysses": 2, "ring": 2, "shard": "full", "recompute": "block"},
    ],
}
PARTS = ["blocks.1.", "blocks.0.cross_attn", "head|norm3", "text_embedding.0|blocks.1.ffn.2.bias"]  # what is trained
FAULTS = [{"fault": "averaged"}, {"ulysses": 2, "fault": "local index"}]


@pytest.mark.parametrize("world", LAYOUTS)
def test_adapters_train_the_same_on_every_layout(world):
    """If this goes, a LoRA run's losses, gradients or adapters depend on the processes (a mask of dropout differs
    between them or in the recomputation, a gradient is averaged or counted twice), or base weights move."""
    reference = train()
    faults = FAULTS if world == 2 else []
    results = spawn(train_all, world, LAYOUTS[world] + faults)
    for records in results:
        for case, record in zip(LAYOUTS[world] + faults, records, strict=True):
            difference = worst(record, reference)
            assert difference > 1e-3 if "fault" in case else difference < 1e-9, (case, difference)
            assert all(torch.equal(record["left"][name], x) for name, x in reference["frozen"].items()), case
    assert all(float(g.norm()) > 1e-6 for step in reference["grads"] for g in step.values())


def test_parts_of_a_model_train_the_same_on_every_layout():
    """If this goes, --trainable fails or trains something else where it leaves a whole block frozen, or trains only
    what lies before, behind or beside the blocks."""
    references = {part: train(trainable=part) for part in PARTS}
    shards = ["none", "grads", "full"]
    cases = [
        {
            "trainable": part,
            "shard": shards[(i + j) % 3],
            "ulysses": 1 + j,
            "pack_tokens": 18 * j,
            "recompute": recompute,
        }
        for i, part in enumerate(PARTS)
        for j, recompute in enumerate(("none", "block"))
    ]
    for records in spawn(train_all, 2, cases):
        for case, record in zip(cases, records, strict=True):
            reference = references[case["trainable"]]
            assert worst(record, reference) < 1e-9, (case, worst(record, reference))
            assert all(torch.equal(record["left"][name], x) for name, x in reference["frozen"].items()), case
