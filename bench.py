"""Time and memory of one DiT configuration, next to diffusers' WanTransformer3DModel on the same weights and inputs.

    python bench.py                                        width 1024, 1,560 tokens, fp32
    python bench.py --precision bf16 --preset wan2.1-t2v-1.3b --layers 2
    python bench.py --balance                              how evenly mixed batches are spread over ranks

Both models run in one process and take turns, so that whatever else the machine does slows both; the figures are
medians. Memory is the allocator's: its peak on a GPU, the profiler's record of every allocation on a CPU.
"""

import contextlib
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
from torch import nn

import flow
import parallel
import stream
from checkpoint import dit_config
from formats import diffusers_name
from model import CONFIGS, WanConfig, WanDiT, patchify
from options import exit_with, parse


@dataclass(frozen=True)
class Config:
    preset: str = ""  # take the sizes of a preset in model.py; empty: those below
    dim: int = 1024  # width
    ffn_dim: int = 4096  # width of the feed-forward
    heads: int = 8  # attention heads
    layers: int = 4  # blocks (also of a preset)
    text_len: int = 512  # text tokens
    latents: tuple[int, int, int] = (5, 24, 52)  # frames, height, width in latents: 4n + 1 of 4, 1/8 of the pixels
    precision: Literal["fp32", "bf16"] = "fp32"  # of weights and pass
    repeats: int = 7  # timed runs of each
    recompute: bool = False  # run blocks again in the backward
    peer: bool = True  # run diffusers beside it
    balance: bool = False  # instead: the modelled loads of data-parallel ranks on images and videos, nothing is run
    trace: bool = False  # instead: what train.py --trace costs, on the demo's model, batch and clip size


def sizes(config: Config) -> WanConfig:
    if config.preset:
        if config.preset not in CONFIGS:
            raise ValueError(f"--preset {config.preset} is none of {', '.join(CONFIGS)}")
        return dataclasses.replace(CONFIGS[config.preset], num_layers=config.layers)
    return WanConfig(
        dim=config.dim,
        ffn_dim=config.ffn_dim,
        num_heads=config.heads,
        num_layers=config.layers,
        text_len=config.text_len,
    )


def build(config: Config, ours: bool) -> nn.Module:
    """Our model, or diffusers' with the same weights; both from one seed."""
    device, dtype = where(config)
    torch.manual_seed(0)
    wan = sizes(config)
    model = WanDiT(wan)
    nn.init.normal_(model.head.head.weight, std=0.02)  # a zero head would send no gradient into the blocks
    if not ours:
        model = diffusers_model(model)
    elif config.recompute:
        for block in model.blocks:
            block.recompute = True
    return model.to(device, dtype)


def diffusers_model(model: WanDiT) -> nn.Module:
    """diffusers' class with our weights. It lives in requirements-dev.txt: nothing that users run needs it."""
    from diffusers import WanTransformer3DModel

    config = dit_config(model.config)
    del config["_class_name"]
    peer = WanTransformer3DModel(**config)
    peer.load_state_dict({diffusers_name(name): tensor for name, tensor in model.state_dict().items()})
    return peer


def where(config: Config) -> tuple[torch.device, torch.dtype]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return device, torch.bfloat16 if config.precision == "bf16" else torch.float32


def inputs(config: Config):
    """Noised latents, their target, timestep and text states of one sample."""
    device, dtype = where(config)
    generator = torch.Generator().manual_seed(1)
    wan = sizes(config)
    latents, target = torch.randn(2, wan.in_dim, *config.latents, generator=generator)
    text = torch.randn(wan.text_len, wan.text_dim, generator=generator)
    timestep = torch.tensor([700.0], device=device)
    return latents.to(device, dtype), target.to(device), timestep, text.to(device, dtype)


def loss_of(model: nn.Module, latents, target, timestep, text) -> torch.Tensor:
    """The training loss of one sample, as each model's users would take it."""
    if isinstance(model, WanDiT):
        prediction = model([latents], timestep, [text], gather=False)  # (L, P)
        target = patchify(target, model.config.patch_size)
        weights = torch.full((len(target),), 1 / target.numel(), device=target.device)
        return flow.flow_loss(prediction, target, weights)
    prediction = model(latents[None], timestep, text[None], return_dict=False)[0][0]
    return (prediction.float() - target).square().mean()


def seconds_of(model: nn.Module, batch, backward: bool) -> float:
    cuda = batch[0].is_cuda
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.set_grad_enabled(backward):
        loss = loss_of(model, *batch)
    if backward:
        model.zero_grad(set_to_none=False)
        loss.backward()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_of(model: nn.Module, batch) -> float:
    """GiB that forward and backward need at their peak beyond weights and gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if batch[0].is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss_of(model, *batch).backward()
        return (torch.cuda.max_memory_allocated() - before) / 2**30
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        loss_of(model, *batch).backward()
    # Every allocation and release in the order of time; CPUs keep no peak of their own.
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(held) / 2**30


def trace_cost(config: Config):
    """Seconds of the demo's step without --trace, with it but at a step that --trace-steps leaves out, and traced."""
    import parity
    import train

    alone, wan = parallel.Layout(device=where(config)[0]), CONFIGS["demo"]
    dataset = parity.MadeUp(wan, ((5, 8, 8),) * 32)
    scratch = dict.fromkeys(("checkpoint", "vae", "text_encoder", "tokenizer"), "scratch")
    base = train.Config(**scratch, steps=config.repeats + 2, sample=False, verify_layout=False)
    medians = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, options in {
            "off": {},
            "left out": {"trace": True, "trace_steps": "0"},
            "on": {"trace": True},
        }.items():
            parity.rehearse(train.fit, dataclasses.replace(base, run=name, **options), alone, dataset, wan.num_layers)
            lines = Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()
            seconds = [sum(json.loads(line)["seconds"].values()) for line in lines]
            medians[name] = statistics.median(seconds[2:])  # the first step measures the noise floor as well
        size = sum(file.stat().st_size for file in Path("runs/on/trace").glob("step-000001.*"))
    off, rest, on = medians["off"], medians["left out"], medians["on"]
    print(f"demo step {off:.3f} s; with --trace {on:.3f} s: {(on - off) / off:.2f} steps more, {size / 2**20:.1f} MiB")
    print(f"with --trace, at a step that --trace-steps leaves out: {rest:.3f} s")


def balance(config: Config, steps: int = 500):
    """A table of what the most loaded rank has, in units of the mean, on a set of half images and half videos of 17, 49
    and 81 frames, all 480x832 (1,560 tokens per latent frame)."""
    frames = [1] * 5000 + [(5, 13, 21)[i % 3] for i in range(5000)]  # latent frames of each item
    dataset = SimpleNamespace(mixture=stream.Mixture((len(frames),)), variants=lambda index: 1)
    print("| model | batch | ranks | dealt | worst | assigned | worst | above 1.1 | bound | bound above 1.1 | alone |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for preset in [config.preset] if config.preset else ["wan2.1-t2v-1.3b", "wan2.1-t2v-14b"]:
        cost = stream.flops_cost(CONFIGS[preset].dim, CONFIGS[preset].ffn_dim, CONFIGS[preset].text_len)
        for size, ranks in ((32, 4), (32, 8), (64, 4), (64, 8), (128, 8)):
            batches = [[1560 * frames[d.index] for d in stream.draws(i, size, 0, dataset)] for i in range(steps)]
            dealt, assigned, bound, single = zip(*(loads_of(tokens, cost, ranks) for tokens in batches), strict=True)
            above, least, alone = (statistics.mean(x > 1.1 for x in y) for y in (assigned, bound, single))
            cells = [preset, size, ranks, *(f"{f(y):.3f}" for y in (dealt, assigned) for f in (statistics.mean, max))]
            cells += [f"{above:.1%}", f"{statistics.mean(bound):.3f}", f"{least:.1%}", f"{alone:.1%}"]
            print("|", " | ".join(map(str, cells)), "|")


def loads_of(tokens: list[int], cost: stream.Cost, ranks: int) -> tuple[float, float, float, float]:
    """The largest load of a step, in units of the mean: of samples dealt out in order, as many to each rank; as
    stream.py assigns them; the least that any assignment could have; and the costliest sample's own.

    Of the j R + 1 costliest samples some of R ranks has j + 1, which cost no less than the last j + 1 of them.
    """
    costs = [cost(n) for n in tokens]
    mean, share, ordered = sum(costs) / ranks, len(costs) // ranks, sorted(costs, reverse=True)
    dealt = max(sum(costs[r * share : (r + 1) * share]) for r in range(ranks))
    assigned = max(stream.loads_of(stream.assign_packs(tokens, costs, ranks, 0), costs))
    bound = max(mean, *(sum(ordered[j * ranks - j : j * ranks + 1]) for j in range(share)))
    return dealt / mean, assigned / mean, bound / mean, ordered[0] / mean


def main(config: Config):
    if config.balance:
        return balance(config)
    if config.trace:
        return trace_cost(config)
    wan, batch = sizes(config), inputs(config)
    models = {"picowan": build(config, True)}
    if config.peer:
        models["diffusers"] = build(config, False)
    tokens = batch[1].numel() // (wan.out_dim * 4)
    flops = wan.num_layers * stream.sample_cost(tokens, wan.dim, wan.ffn_dim, wan.text_len)
    print(f"{wan.num_layers} blocks of width {wan.dim}, {tokens} tokens, {config.precision}, {where(config)[0].type}")

    times = {(name, backward): [] for name in models for backward in (False, True)}
    for model in models.values():  # warm up
        seconds_of(model, batch, True)
    for _ in range(config.repeats):
        for name, backward in times:
            times[name, backward].append(seconds_of(models[name], batch, backward))
    median = {key: statistics.median(values) for key, values in times.items()}
    for name in models:
        for backward, what, factor in ((False, "forward", 1), (True, "forward + backward", 3)):
            s = median[name, backward]
            print(
                f"  {name:10} {what:19} {s:8.3f} s {tokens / s:9.0f} tokens/s {factor * flops / s / 1e12:8.3f} TFLOP/s"
            )
    peaks = {name: peak_of(model, batch) for name, model in models.items()}
    for name, peak in peaks.items():
        print(f"  {name:10} peak of forward + backward beyond weights and gradients: {peak:.3f} GiB")
    if config.peer:
        forward, both = (median["picowan", b] / median["diffusers", b] for b in (False, True))
        memory = peaks["picowan"] / peaks["diffusers"]
        print(f"  picowan / diffusers: forward {forward:.3f}, forward + backward {both:.3f}, peak memory {memory:.3f}")


if __name__ == "__main__":
    try:
        main(parse(Config, sys.argv[1:], __doc__))
    except ValueError as error:
        exit_with("bench.py", error)
