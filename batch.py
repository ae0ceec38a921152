"""The packs of a step: samples drawn, read, noised and laid end to end; and the loss of a pack."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import flow
import stream
from model import CONFIGS, patchify


@dataclass
class Pack:
    """One micro-batch, on the CPU until `pack_loss` takes it."""

    positions: list[int]
    samples: list[int]  # which items of the data they are
    clean: list[Tensor]  # latents before the noise; these two are only traced
    noise: list[Tensor]
    latents: list[Tensor]  # noised, (C, F, H, W)
    targets: list[Tensor]  # noise - latents
    timesteps: list[float]
    text: list[Tensor]
    weights: list[float]  # of each sample's summed squared error in the loss of the global batch


def step_packs(config, dataset, layout, step: int) -> tuple[list[Pack], int]:
    """This rank's packs of a step, and how many tokens all ranks' have. A pure function of (config, data, step): every
    rank works out the whole assignment and builds its own part of it."""
    wan = CONFIGS[config.model]
    drawn = stream.draws(step, config.batch_size, config.seed, dataset, config.caption_dropout)
    tokens = [math.prod(dataset.shape(d.index)[1:]) // math.prod(wan.patch_size) for d in drawn]
    costs = [stream.sample_cost(n, wan.dim, wan.ffn_dim, wan.text_len) for n in tokens]
    assigned = stream.assign_packs(tokens, costs, layout.dp, config.pack_tokens * layout.sp)[layout.dp_rank]
    return [make_pack([drawn[i] for i in numbers], config, dataset) for numbers in assigned], sum(tokens)


def make_pack(drawn: list[stream.Draw], config, dataset) -> Pack:
    """Noise the samples. All randomness comes from each sample's position, so it is the same wherever that lands."""
    if not drawn:  # nothing left for this rank: one blank token of weight zero keeps it in step with the others
        wan = CONFIGS[config.model]
        blank = torch.zeros(wan.in_dim, *wan.patch_size)
        return Pack([], [], [], [], [blank], [blank], [0.0], [dataset.empty_text], [0.0])
    low, high = config.noise_range
    uniforms = torch.tensor([d.uniform for d in drawn], dtype=torch.float64)
    sigmas = flow.training_sigmas(uniforms, config.shift, config.timestep_sampling, low, high)
    weights = flow.bell_weight(sigmas, config.shift) if config.loss_weight == "bell" else torch.ones_like(sigmas)
    pack = Pack([d.position for d in drawn], [d.index for d in drawn], [], [], [], [], [], [], [])
    for d, sigma, weight in zip(drawn, sigmas.tolist(), weights.tolist(), strict=True):
        wide = torch.float64 if config.precision == "fp64" else torch.float32
        x = dataset.latents(d.index, d.variant).to(wide)
        # Drawn in float32 on the CPU whatever the precision and the device: a run's noise is one thing.
        noise = torch.randn(x.shape, generator=stream.generator(config.seed, d.position, "noise")).to(wide)
        pack.clean.append(x)
        pack.noise.append(noise)
        pack.latents.append(flow.add_noise(x, noise, sigma))
        pack.targets.append(flow.velocity_target(x, noise))
        pack.timesteps.append(1000 * sigma)
        pack.text.append(dataset.empty_text if d.dropped else dataset.text(d.index))
        pack.weights.append(weight / (config.batch_size * x.numel()))
    return pack


def pack_loss(model, pack: Pack, layout, dtype) -> Tensor:
    """This rank's share of the loss: of the pack's tokens those that lie here. Targets and weights are cut as the
    model cuts the tokens; padding gets weight zero."""
    sp, device, patch_size = layout.seam(), layout.device, model_config(model).patch_size
    targets = [patchify(x, patch_size) for x in pack.targets]
    weights = [torch.full((len(t),), w, dtype=t.dtype) for t, w in zip(targets, pack.weights, strict=True)]
    target = sp.shard(torch.cat(targets)).to(device, non_blocking=True)  # (l, P)
    weight = sp.shard(torch.cat(weights)).to(device, non_blocking=True)  # (l,)
    latents = [x.to(device, dtype, non_blocking=True) for x in pack.latents]
    text = [x.to(device, dtype, non_blocking=True) for x in pack.text]
    timesteps = [torch.tensor(t, dtype=torch.float64) for t in pack.timesteps]
    prediction = model(latents, timesteps, text, sp=sp, gather=False)  # (l, P)
    return flow.flow_loss(prediction, target, weight)


def model_config(model):
    return getattr(model, "module", model).config  # DDP keeps the model in .module
