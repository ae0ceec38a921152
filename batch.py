"""The packs of a step: samples drawn, read, noised and laid end to end; and the loss of a pack."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import flow
import lora
import stream
from condition import frame_sigmas
from model import CONFIGS, LOCAL, Block, WanConfig, patchify
from model import layout as pack_layout
from presets import PRESETS

IMAGE_TOKENS = 257  # CLIP's class token and 16 x 16 patches


@dataclass
class Pack:
    """One micro-batch, on the CPU until `pack_loss` takes it. One entry per sample; F its latent frames."""

    seed: int = 0  # with the positions, the key of the adapters' dropout
    positions: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)  # which items of the data they are
    clean: list[Tensor] = field(default_factory=list)  # latents before the noise; these two are only traced
    noise: list[Tensor] = field(default_factory=list)
    latents: list[Tensor] = field(default_factory=list)  # noised, (C, F, H, W)
    targets: list[Tensor] = field(default_factory=list)  # noise - latents
    timesteps: list[Tensor] = field(default_factory=list)  # (1,), or (F,) where the first latent frame is given
    text: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)  # (1,) or (F,): of each squared error in the global loss
    condition: list[Tensor] = field(default_factory=list)  # empty where the model takes none, as the next
    image: list[Tensor] = field(default_factory=list)  # (1 or 2, 257, clip_dim)
    shares: Tensor | None = None  # (S,): pack_loss leaves here what each sample adds to the loss on this rank


@dataclass
class Step:
    """This rank's part of a step, and what is known of the whole."""

    packs: dict[str, list[Pack]]  # by expert, "" where the model is one; none for one without samples
    sigmas: list[float]  # of all samples of the global batch
    experts: dict[str, list[int]]  # which of them each expert trains on
    tokens: int  # of all ranks
    idle: float  # share of the step that the average data-parallel rank waits for the busiest, by modelled cost


def step_packs(config, dataset, layout, step: int, cost: stream.Cost | None = None) -> Step:
    """A pure function of (config, data, step, cost): every rank works out the whole assignment and builds its own
    part."""
    drawn = stream.draws(step, config.batch_size, config.seed, dataset, config.caption_dropout)
    return divide(drawn, config, dataset, layout, cost)


def divide(drawn: list[stream.Draw], config, dataset, layout, cost: stream.Cost | None = None) -> Step:
    """The samples of a step, by expert, over ranks and packs. cost: of a sample; None: by its operations."""
    wan, sigmas = CONFIGS[config.model], sigmas_of(drawn, config)
    cost = cost or stream.flops_cost(wan.dim, wan.ffn_dim, wan.text_len)
    tokens = [token_count(dataset.shape(d.index, d.variant), wan) for d in drawn]
    costs = [cost(n) for n in tokens]
    result = Step({}, sigmas, routed(sigmas, config), sum(tokens), 0.0)
    loads = []
    for expert, numbers in result.experts.items():
        shares = stream.assign_packs(
            [tokens[i] for i in numbers], [costs[i] for i in numbers], layout.dp, config.pack_tokens * layout.sp
        )
        loads.append(stream.loads_of(shares, [costs[i] for i in numbers]))
        packs = [[numbers[j] for j in pack] for pack in shares[layout.dp_rank]]
        result.packs[expert] = [
            make_pack([drawn[i] for i in pack], [sigmas[i] for i in pack], config, dataset) for pack in packs
        ]
    result.idle = stream.idle_share(loads)
    return result


def token_count(shape: Sequence[int], wan: WanConfig) -> int:
    """Of latents (C, F, H, W)."""
    return math.prod(shape[1:]) // math.prod(wan.patch_size)


def longest(dataset, wan: WanConfig) -> int:
    """Tokens of the longest sample that the data can give."""
    clips = [(i, variant) for i in range(len(dataset)) for variant in range(dataset.variants(i))]
    return max(token_count(dataset.shape(*clip), wan) for clip in clips)


def sigmas_of(drawn: list[stream.Draw], config) -> list[float]:
    uniforms = torch.tensor([d.uniform for d in drawn], dtype=torch.float64)
    return flow.training_sigmas(uniforms, config.shift, config.timestep_sampling, *config.noise_range).tolist()


def experts_of(config) -> tuple[str, ...]:
    """The names of the models that a run trains: one, "" where there are no experts, or both."""
    return ("high", "low") if config.expert == "both" else (config.expert,)


def routed(sigmas: list[float], config) -> dict[str, list[int]]:
    """Which samples of a step each expert trains on, by their sigma; experts without any are left out."""
    if config.expert != "both":
        return {config.expert: list(range(len(sigmas)))}
    boundary = PRESETS[config.model].boundary
    high = [i for i, sigma in enumerate(sigmas) if sigma >= boundary]
    low = [i for i, sigma in enumerate(sigmas) if sigma < boundary]
    return {name: numbers for name, numbers in (("high", high), ("low", low)) if numbers}


def make_pack(drawn: list[stream.Draw], sigmas: list[float], config, dataset) -> Pack:
    """Noise the samples. All randomness comes from each sample's position, so it is the same wherever that lands."""
    if not drawn:
        return empty_pack(CONFIGS[config.model], dataset)
    pack = Pack(config.seed, [d.position for d in drawn], [d.index for d in drawn])
    for d, sigma, weight in zip(drawn, sigmas, loss_weights(sigmas, config), strict=True):
        wide = torch.float64 if config.precision == "fp64" else torch.float32
        sample = {name: x.to(wide) for name, x in dataset.sample(d.index, d.variant).items()}
        given = is_conditioned(d.position, config)
        for name, values in (("condition", pack.condition), ("image", pack.image)):
            if name in sample:
                values.append(sample[name] if given else torch.zeros_like(sample[name]))
        x = sample["latents"]
        # Drawn in float32 on the CPU whatever the precision and the device: a run's noise is one thing.
        noise = torch.randn(x.shape, generator=stream.generator(config.seed, d.position, "noise")).to(wide)
        noise_levels, counted = torch.tensor([sigma], dtype=torch.float64), x.numel()
        if given and PRESETS[config.model].condition == "first-latent" and x.shape[1] > 1:
            noise_levels, counted = frame_sigmas(sigma, x.shape[1]), x[:, 1:].numel()
        pack.clean.append(x)
        pack.noise.append(noise)
        pack.latents.append(flow.add_noise(x, noise, noise_levels.view(-1, 1, 1)))
        pack.targets.append(flow.velocity_target(x, noise))
        pack.timesteps.append(1000 * noise_levels)
        pack.text.append(dataset.empty_text if d.dropped else dataset.text(d.index))
        counts = (noise_levels > 0).to(noise_levels)  # what is given has no loss
        pack.weights.append(counts * weight / (config.batch_size * counted))
    return pack


def loss_weights(sigmas: list[float], config) -> list[float]:
    """What --loss-weight gives to samples of these sigmas."""
    if config.loss_weight == "none":
        return [1.0] * len(sigmas)
    return flow.bell_weight(torch.tensor(sigmas, dtype=torch.float64), config.shift).tolist()


def is_conditioned(position: int, config) -> bool:
    """Whether the sample at a position is given its frames, or trains as text to video."""
    chance = torch.rand((), generator=stream.generator(config.seed, position, "condition"), dtype=torch.float64)
    return float(chance) < config.image_condition


def empty_pack(wan, dataset) -> Pack:
    """Nothing left for this rank: one blank token of weight zero keeps it in step with the others."""
    blank, zero = torch.zeros(wan.out_dim, *wan.patch_size), torch.zeros(1, dtype=torch.float64)
    pack = Pack(latents=[blank], targets=[blank], timesteps=[zero], text=[dataset.empty_text], weights=[zero])
    if wan.in_dim > wan.out_dim:
        pack.condition.append(torch.zeros(wan.in_dim - wan.out_dim, *wan.patch_size))
    if wan.reads_clip:
        pack.image.append(torch.zeros(2 if wan.model_type == "flf2v" else 1, IMAGE_TOKENS, wan.clip_dim))
    return pack


def block_pass(wan: WanConfig, device: torch.device, dtype: torch.dtype):
    """A function that runs one block forward and backward on a pack, given its samples' token counts: what
    stream.measure_cost times. This process holds every token."""
    block = Block(wan).to(device)

    def run(lengths: list[int]) -> None:
        S, L, wide = len(lengths), sum(lengths), torch.promote_types(dtype, torch.float32)
        x = torch.randn(L, wan.dim, device=device, dtype=dtype, requires_grad=True)  # of zeros, a GPU is faster
        time = torch.randn(S, 6, wan.dim, device=device, dtype=wide)
        text = torch.randn(S, wan.text_len, wan.dim, device=device, dtype=dtype)
        image = torch.randn(S, IMAGE_TOKENS, wan.dim, device=device, dtype=dtype) if wan.reads_clip else None
        rope = tuple(torch.randn(2, L, wan.dim // wan.num_heads // 2, device=device, dtype=wide))
        pack = pack_layout([(1, 1, n) for n in lengths], [1] * S, LOCAL)
        block(x, time, text, image, rope, pack).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run


def pack_loss(model, pack: Pack, layout, dtype) -> Tensor:
    """This rank's share of the loss: of the pack's tokens those that lie here. Targets and weights are cut as the
    model cuts the tokens; padding gets weight zero."""
    inner = getattr(model, "module", model)  # DDP keeps the model in .module
    wan, sp, device = inner.config, layout.seam(), layout.device
    targets = [patchify(x, wan.patch_size) for x in pack.targets]
    weights = [w.repeat_interleave(len(t) // len(w)).to(t.dtype) for t, w in zip(targets, pack.weights, strict=True)]
    target = sp.shard(torch.cat(targets)).to(device, non_blocking=True)  # (l, P)
    weight = sp.shard(torch.cat(weights)).to(device, non_blocking=True)  # (l,)
    owners = torch.cat([torch.full((len(t),), i) for i, t in enumerate(targets)])
    owner = sp.shard(owners).to(device, non_blocking=True)  # (l,); padding says 0 and weighs nothing

    if any(layer.dropout for layer in lora.layers(inner)):
        image_tokens = math.prod(pack.image[0].shape[:2]) if pack.image else 0
        lengths = [len(t) for t in targets]
        lora.set_keys(
            inner, lora.dropout_keys(pack.seed, pack.positions, lengths, wan.text_len, image_tokens, sp.shard)
        )

    def ready(tensors: list[Tensor]) -> list[Tensor]:
        return [x.to(device, dtype, non_blocking=True) for x in tensors]

    prediction = model(
        ready(pack.latents),
        pack.timesteps,
        ready(pack.text),
        image=torch.cat(ready(pack.image)) if pack.image else None,
        condition=ready(pack.condition) if pack.condition else None,
        sp=sp,
        gather=False,
    )  # (l, P)
    pack.shares = flow.sample_losses(prediction.detach(), target, weight, owner, len(targets))
    return flow.flow_loss(prediction, target, weight)
