"""Adapters: against hand arithmetic, PEFT and autograd; and that training them does not depend on the layout."""

import math
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
    weights = [1 / (B * x[0].numel()) for x in samples]
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
    record["file"] = lora.adapters_of(model, whole_weights(trained, layout.rank))
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
FAULTS = [{"fault": "averaged"}, {"ulysses": 2, "fault": "local index"}]
PARTS = ["blocks.1.", "blocks.0.cross_attn", "head|norm3", "text_embedding.0|blocks.1.ffn.2.bias"]  # what is trained
SHARDS = ["none", "grads", "full"]
PARTIAL = [
    {"trainable": part, "shard": SHARDS[(i + j) % 3], "ulysses": 1 + j, "pack_tokens": 18 * j, "recompute": recompute}
    for i, part in enumerate(PARTS)
    for j, recompute in enumerate(("none", "block"))
]
ROUGH = [{"precision": "bf16", "shard": shard, "ulysses": u} for shard, u in (("none", 1), ("full", 2), ("grads", 1))]


@pytest.fixture(scope="module")
def reference():
    return train()


@pytest.fixture(scope="module")
def two_ranks():
    """What each rank of two recorded: pairs of a case and its record. All cases at once, since starting is slow."""
    cases = LAYOUTS[2] + FAULTS + PARTIAL + ROUGH
    return [list(zip(cases, records, strict=True)) for records in spawn(train_all, 2, cases)]


@pytest.fixture(scope="module")
def four_ranks():
    """Each rank's pairs of a case and its record, and what `merge_sharded` returned."""
    results = spawn(train_and_merge, 4, LAYOUTS[4])
    return [(list(zip(LAYOUTS[4], records, strict=True)), merged) for records, merged in results]


@pytest.mark.parametrize("world", LAYOUTS)
def test_adapters_train_the_same_on_every_layout(reference, two_ranks, four_ranks, world):
    """If this goes, a LoRA run's losses, gradients or adapters depend on the processes (a mask of dropout differs
    between them or in the recomputation, a gradient is averaged or counted twice), or base weights move; or what is
    saved is not what was trained."""
    results = two_ranks if world == 2 else [pairs for pairs, _ in four_ranks]
    for rank, pairs in enumerate(results):
        for case, record in pairs[: len(LAYOUTS[world])]:
            assert worst(record, reference) < 1e-9, (case, worst(record, reference))
            assert all(torch.equal(record["left"][name], x) for name, x in reference["frozen"].items()), case
            assert record["file"].adapters.keys() == (reference["file"].adapters.keys() if rank == 0 else set())
            for name, (down, up, alpha) in record["file"].adapters.items():
                assert torch.equal(down, record["params"][f"{name}.lora_A"]) and alpha == 5
                assert torch.equal(up, record["params"][f"{name}.lora_B"])
    assert all(float(g.norm()) > 1e-6 for step in reference["grads"] for g in step.values())
    assert (
        len(reference["params"]) == 2 * 2 * 12
    )  # two blocks; eight layers of attention, two of images, two of the ffn


def test_the_layout_test_sees_faults(reference, two_ranks):
    """If this goes, an averaged gradient or a mask that knows its rank passes the test above."""
    for case, record in two_ranks[0]:
        if "fault" in case:
            assert worst(record, reference) > 1e-3, case


def test_parts_of_a_model_train_the_same_on_every_layout(two_ranks):
    """If this goes, --trainable fails or trains something else where it leaves a whole block frozen, or trains only
    what lies before, behind or beside the blocks."""
    references = {part: train(trainable=part) for part in PARTS}
    for records in two_ranks:
        for case, record in records:
            if "trainable" in case:
                reference = references[case["trainable"]]
                assert worst(record, reference) < 1e-9, (case, worst(record, reference))
                assert all(torch.equal(record["left"][name], x) for name, x in reference["frozen"].items()), case


def test_bfloat16_base_under_float32_adapters(two_ranks):
    """If this goes, the way people train adapters (frozen matrices in bfloat16, adapters and their gradients in
    float32) fails under DDP or FSDP2, or a layout's losses differ by more than rounding, or base weights move."""
    reference = train(precision="bf16")
    assert reference["frozen"]["blocks.0.self_attn.q.weight"].dtype == torch.bfloat16
    assert reference["frozen"]["head.head.weight"].dtype == torch.float32
    for records in two_ranks:
        for case, record in records:
            if "precision" not in case:
                continue
            assert {x.dtype for x in record["grads"][0].values()} == {torch.float32}, case
            for a, b in zip(record["loss"], reference["loss"], strict=True):
                assert abs(a - b) < 5e-3 * abs(b), (case, a, b)
            assert all(torch.equal(record["left"][name], x) for name, x in reference["frozen"].items()), case


# ---------------------------------------------------------------------------------------------------------------------
# The layer


def layer(dropout=0.0) -> lora.LoRALinear:
    torch.manual_seed(3)
    new = lora.LoRALinear(torch.nn.Linear(5, 4, dtype=torch.float64), "blocks.0.self_attn.q", 3, 6.0, dropout)
    for parameter in new.parameters():
        torch.nn.init.normal_(parameter)
    return new


def scrambled(x: int) -> int:
    """lora.mix in Python's integers, which do not overflow."""
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B % 2**32
    return (x >> 16) ^ x


def test_the_layer_is_its_formula():
    """If this goes, alpha, the rank, the bias or the mask enter wrongly, or a gradient is not the forward's."""
    here, x = layer(dropout=0.4), torch.randn(7, 5, dtype=torch.float64)
    here.keys = torch.arange(7) * 1234567 % 2**32
    name = lora.hash32("blocks.0.self_attn.q/dropout")
    keep = [
        [scrambled(scrambled(key ^ name) ^ i) >= round(0.4 * 2**32) for i in range(3)] for key in here.keys.tolist()
    ]
    for training, mask in ((True, torch.tensor(keep, dtype=torch.float64) / 0.6), (False, 1.0)):
        here.train(training)
        expected = x @ here.weight.T + here.bias + 6.0 / 3 * (x @ here.lora_A.T * mask) @ here.lora_B.T
        assert distance(here(x).detach(), expected.detach()) < 1e-14
    here.train()

    def of(a, b, x):
        return torch.func.functional_call(here, {"lora_A": a, "lora_B": b}, x)

    inputs = [t.detach().clone().requires_grad_() for t in (here.lora_A, here.lora_B, x)]
    assert torch.autograd.gradcheck(of, inputs)


def test_dropout_is_a_fair_coin_for_each_number():
    """If this goes, masks strike too often or too seldom, or alike in neighbouring tokens, components, positions or
    layers, which trains as if the rank or the batch were smaller."""
    p = 0.3
    keys = torch.stack(
        [lora.dropout_keys(0, [i], [400], 1, 0, lambda x: x).tokens for i in range(8)]
    )  # (positions, tokens)
    names = [lora.hash32(f"blocks.{i}.ffn.0/dropout") for i in range(4)]
    masks = torch.stack(
        [lora.keep_mask(keys, name, 16, p) for name in names]
    ).double()  # (layers, positions, tokens, r)
    noise = 5 / math.sqrt(masks.numel())  # five standard errors
    assert abs(masks.mean() - (1 - p)) < noise * math.sqrt(p * (1 - p))
    centred = (masks - (1 - p)) / math.sqrt(p * (1 - p))
    for dim in range(4):
        for lag in (1, 2):
            assert abs((centred * centred.roll(lag, dim)).mean()) < noise, (dim, lag)


def test_dropout_keys_follow_the_samples():
    """If this goes, the key of a token, text state or image token depends on the pack that its sample is in."""

    def keys(positions, lengths):
        return lora.dropout_keys(5, positions, lengths, 4, 6, lambda x: x)

    together, first, second = keys([8, 3], [5, 7]), keys([8], [5]), keys([3], [7])
    for whole_pack, *parts in zip(together, first, second, strict=True):
        assert torch.equal(whole_pack, torch.cat(parts))
    assert len(together.tokens.unique()) == 12 and len(keys([8], [7]).tokens.unique()) == 7
    assert keys([], [1]).text.shape == (1, 4)
    other = lora.dropout_keys(6, [8, 3], [5, 7], 4, 0, lambda x: x)
    assert other.image is None and not (other.tokens == together.tokens).any()


def test_dropout_without_keys_is_an_error():
    """If this goes, a loop that forgets the keys trains with the last pack's, or none."""
    with pytest.raises(RuntimeError, match="set_keys"):
        layer(dropout=0.1)(torch.randn(2, 5, dtype=torch.float64))


# ---------------------------------------------------------------------------------------------------------------------
# Putting adapters in


def test_attach_takes_what_it_names_and_freezes_the_rest():
    """If this goes, adapters sit at other layers than those named, base names change (so checkpoints do not load), a
    fresh adapter changes the model, or more than adapters is trained."""
    model, plain = tiny(), tiny()
    lora.attach(model, 2, 2.0, "self_attn.k,ffn.0")
    names = [x.name for x in lora.layers(model)]
    assert names == [f"blocks.{i}.{x}" for i in (0, 1) for x in ("self_attn.k", "ffn.0")]
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        f"{name}.lora_{x}" for name in names for x in "AB"
    }
    assert plain.state_dict().keys() == {name for name in model.state_dict() if "lora_" not in name}
    assert all(torch.equal(model.state_dict()[name], x) for name, x in plain.state_dict().items())
    latents, _, timestep, text, condition, image = sample(0)
    inputs = [latents], [timestep], [text], image, [condition]
    assert torch.equal(model(*inputs)[0], plain(*inputs)[0])


def test_the_start_of_an_adapter_depends_on_its_name_and_seed_alone():
    """If this goes, the same run starts elsewhere with other targets, or where the model was built without memory."""
    first, second, other = tiny(), tiny(), tiny()
    with torch.device("meta"):
        late = WanDiT(TINY)
    for model, targets, seed in ((first, TARGETS, 1), (second, "o", 1), (other, "o", 2), (late, "o", 5)):
        lora.attach(model, 3, 3.0, targets, seed=seed)
    late = late.to_empty(device="cpu").double()
    lora.reset_adapters(late, 1)
    a, b, c, d = (model.blocks[1].cross_attn.o.lora_A for model in (first, second, other, late))
    assert torch.equal(a, b) and torch.equal(a, d) and not torch.equal(a, c)
    assert not torch.equal(a, first.blocks[0].cross_attn.o.lora_A)
    assert 0.9 < float(a.detach().abs().max()) * math.sqrt(48) <= 1 and abs(float(a.detach().mean())) < 0.1
    assert late.blocks[1].cross_attn.o.lora_B.count_nonzero() == 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"targets": "q,w"}, "named 'w'; there are self_attn.q, "),
        ({"targets": "embedding.0"}, "named 'embedding.0'"),
        ({"targets": "attn.q"}, "named 'attn.q'"),
        ({"rank": 0}, "rank 0"),
        ({"dropout": 1.0}, "dropout 1.0"),
    ],
)
def test_attach_refuses_what_cannot_be_meant(options, message):
    """If this goes, a misspelt target trains fewer layers than asked for, and nobody is told."""
    with pytest.raises(ValueError, match=message):
        lora.attach(tiny(), **({"rank": 2, "alpha": 2.0} | options))


def test_peft_agrees():
    """If this goes, our adapter is not what the field calls LoRA: outputs or gradients differ from PEFT's."""
    peft = pytest.importorskip("peft")
    ours, theirs = with_adapters(tiny(), dropout=0.0), tiny()
    modules = [x.name for x in lora.layers(ours)]
    peft.inject_adapter_in_model(peft.LoraConfig(r=3, lora_alpha=5, target_modules=modules), theirs)
    theirs.double()
    for name in modules:
        for letter in "AB":
            source = ours.get_parameter(f"{name}.lora_{letter}")
            theirs.get_parameter(f"{name}.lora_{letter}.default.weight").data.copy_(source.data)
    latents, target, timestep, text, condition, image = sample(0)
    for model in (ours, theirs):
        (model([latents], [timestep], [text], image, [condition])[0] - target).square().sum().backward()
    for name in modules:
        for letter in "AB":
            grad = ours.get_parameter(f"{name}.lora_{letter}").grad
            assert distance(grad, theirs.get_parameter(f"{name}.lora_{letter}.default.weight").grad) < 1e-12


# ---------------------------------------------------------------------------------------------------------------------
# Files of adapters


def file_of(model) -> LoRA:
    return lora.adapters_of(model, whole_weights(dict(model.named_parameters()), rank=0))


def test_a_merged_model_is_the_model_with_adapters():
    """If this goes, a merged checkpoint samples something else than what was trained, or scales do not scale."""
    adapted, merged = with_adapters(tiny()).eval(), tiny()
    file = file_of(adapted)
    assert lora.merge(merged, file, 0.25) == lora.merge(merged, file, 0.75) == {}
    latents, _, timestep, text, condition, image = sample(0)
    inputs = [latents], [timestep], [text], image, [condition]
    plain, ours = tiny()(*inputs)[0].detach(), adapted(*inputs)[0].detach()
    assert distance(merged(*inputs)[0].detach(), ours) < 1e-12 and distance(plain, ours) > 0.01


def test_merging_rounds_once():
    """If this goes, a bfloat16 model's change is summed up in bfloat16 and most of it lost; or a convolution's adapter,
    whose factors have the kernel's shape, does not fit."""
    torch.manual_seed(0)
    weight, down, up = torch.randn(6, 3, 1, 2, 2).bfloat16(), torch.randn(4, 3, 1, 2, 2), torch.randn(6, 4, 1, 1, 1)
    change = torch.einsum("or,rchw->ochw", up[..., 0, 0, 0].double(), down[:, :, 0].double()).unsqueeze(2)
    expected = (weight.double() + 0.01 * 2 / 4 * change).bfloat16()
    assert torch.equal(lora.grown(weight, Adapter(down, up, 2.0), 0.01), expected)


def train_and_merge(cases: list[dict]) -> tuple:
    return train_all(cases), merge_sharded()


def merge_sharded() -> list[dict]:
    """A sharded model with a file merged in, one with fresh adapters, one with the file's, all whole."""
    layout, file = parallel.start(1, 1), with_more(file_of(with_adapters(tiny())))
    merged, fresh, filled = tiny(), tiny(), tiny()
    for model in (fresh, filled):
        lora.attach(model, 3, 5.0, TARGETS, seed=9)
    for model in (merged, fresh, filled):
        parallel.parallelize(model, layout, "full", "fp64", "none", compile=False)
        assert all(isinstance(p, DTensor) for p in model.parameters())
    lora.merge(merged, file, 0.5)
    lora.reset_adapters(fresh, 1)
    lora.adapters_into(filled, file._replace(diffs={}))
    return [whole({name: p.detach() for name, p in model.named_parameters()}) for model in (merged, fresh, filled)]


DIFFS = ["blocks.0.self_attn.q.weight", "blocks.1.modulation", "patch_embedding.weight"]


def with_more(file: LoRA) -> LoRA:
    """With a whole difference of a layer that has an adapter too, and of a vector that no number of ranks divides."""
    torch.manual_seed(4)
    diffs = {name: torch.randn_like(tiny().get_parameter(name)) for name in DIFFS}
    return file._replace(diffs=diffs)


def test_files_go_into_shards(four_ranks):
    """If this goes, merging or going on from a file works in one process only, or starts differ between layouts."""
    file = with_more(file_of(with_adapters(tiny())))
    merged, fresh, filled = tiny(), tiny(), with_adapters(tiny())
    lora.merge(merged, file, 0.5)
    lora.attach(fresh, 3, 5.0, TARGETS, seed=1)
    for _, results in four_ranks:
        for result, expected in zip(results, (merged, fresh, filled), strict=True):
            assert result.keys() == dict(expected.named_parameters()).keys()
            assert all(distance(result[name], p.detach()) < 1e-14 for name, p in expected.named_parameters())


def test_a_file_for_another_model_is_refused():
    """If this goes, a LoRA of another model or with unknown names is merged in silence, in part or not at all."""
    file, model = file_of(with_adapters(tiny())), tiny()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    stranger = Adapter(torch.zeros(2, 48), torch.zeros(48, 2), 2.0)
    with pytest.raises(ValueError, match=r"none of the LoRA's 2 parts .*'w.weight': 2"):
        lora.merge(model, LoRA({"blocks.0.w": stranger, "blocks.1.w": stranger}, {}))
    with pytest.raises(ValueError, match=r"blocks.1.ffn.0.weight is \(48, 48\), the model's \(80, 48\)"):
        lora.merge(model, LoRA(file.adapters | {"blocks.1.ffn.0": stranger}, {}))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    extended = LoRA(
        file.adapters | {"blocks.0.w": stranger, "blocks.1.w": stranger}, {"blocks.9.norm3.bias": torch.ones(48)}
    )
    assert lora.merge(model, extended) == {"w.weight": 2, "norm3.bias": 1}


def test_going_on_from_a_file_asks_for_the_same_adapters():
    """If this goes, training goes on with part of a file, or with another scale than it was trained at."""
    file = file_of(with_adapters(tiny()))
    for rank, alpha, targets, message in (
        (3, 5.0, "q,k", "--lora-targets differ"),
        (4, 5.0, TARGETS, "--lora-rank 3 --lora-alpha 5"),
        (3, 4.0, TARGETS, "alpha 5.0 in the file"),
    ):
        model = tiny()
        lora.attach(model, rank, alpha, targets)
        with pytest.raises(ValueError, match=message):
            lora.adapters_into(model, file)
    with pytest.raises(ValueError, match="norm3.bias"):
        lora.adapters_into(with_adapters(tiny()), file._replace(diffs={"blocks.0.norm3.bias": torch.ones(48)}))
