"""Text or images to video: load the models, integrate the flow, decode, write mp4 files and a contact sheet.

    python sample.py --prompt "a red circle moves left over a dark ground"
    torchrun --nproc-per-node 4 sample.py --sp 4 --model wan2.1-i2v-14b --checkpoint ... --image cat.png --prompt "..."

Sequence-parallel ranks compute one video together, data-parallel ones divide the prompts. The noise of prompt i is a
function of (seed, i) alone, so the videos do not depend on the number of processes.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

import lora
import parallel
import stream
from condition import padded, prepared, size_for, to_unit, with_mask
from flow import TIMESTEPS, DPMSolver, Euler, UniPC
from image_encoder import CLIP_CONFIGS, CLIPVision
from lora_formats import read_lora
from memory import WHOLE, Memory
from model import CONFIGS, LOCAL, WanDiT
from options import exit_with, parse
from presets import PRESETS, Preset, Sampling
from prompts import Request, requests_of
from text_encoder import UMT5_CONFIGS, Tokenizer, UMT5Encoder, encode_prompts
from tiles import TiledVAE
from vae import VAE_CONFIGS, WanVAE
from video import contact_sheet, read_mp4, write_mp4
from weights import expert_path, load_weights

ASSETS = Path(__file__).resolve().parent / "assets"
SOLVERS = {"unipc": UniPC, "euler": Euler, "dpm++": DPMSolver}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Config:
    model: str = "demo"  # preset, see CONFIGS in model.py
    checkpoint: str = ""  # weights of the model: a file or a folder; empty: the demo's
    low_checkpoint: str = ""  # of the low-noise expert, where --checkpoint is the high-noise one's
    vae: str = ""  # weights of the VAE; empty: the demo's
    text_encoder: str = ""  # weights of the umT5 encoder; empty: the demo's
    tokenizer: str = ""  # SentencePiece file (google/umt5-xxl/spiece.model); empty: the demo's
    image_encoder: str = ""  # weights of the CLIP vision tower, for Wan 2.1's image to video; empty: the demo's
    lora: tuple[str, ...] = ()  # LoRA files to merge, PATH or PATH:SCALE; of two experts, the high-noise one's
    lora_low: tuple[str, ...] = ()  # the low-noise expert's
    prompt: tuple[str, ...] = ()  # one or more prompts, each in quotes
    image: tuple[str, ...] = ()  # the first frame: one picture for all prompts, or one for each
    last_image: tuple[str, ...] = ()  # the last frame, for first-and-last-frame models
    prompts: str = ""  # a file with a prompt per line, or with JSON rows (.jsonl) of prompt, image and last_image
    negative_prompt: str | None = None  # what guidance steers away from; default: the released one, "" for the demo
    solver: Literal["unipc", "euler", "dpm++"] | None = None  # default: the model's own, as for all options below
    sampling_steps: int | None = None  # solver steps
    shift: float | None = None  # of the noise schedule towards noise
    guidance: float | None = None  # classifier-free guidance scale; 1 turns it off
    guidance_low: float | None = None  # of the low-noise expert
    height: int | None = None  # pixels; with an image, height x width is the area and the image gives the aspect
    width: int | None = None  # pixels
    frames: int | None = None  # of the video, 4n + 1
    fps: int | None = None  # of the file
    seed: int = 0  # of the noise
    sp: int = 0  # sequence-parallel processes per video; 0: all that --ulysses and --ring say, or 1
    ulysses: int = 0  # of which by all-to-all over heads; 0: the largest number that divides sp and the heads
    ring: int = 0  # of which by a ring of keys and values; 0: the rest
    precision: Literal["fp64", "fp32", "bf16"] = "fp32"  # of the model's pass; the VAE runs in float32
    text_precision: Literal["", "fp32", "bf16"] = ""  # of the umT5 encoder; empty: bf16, as released, the demo's fp32
    shard: Literal["none", "full"] = "none"  # full: the ranks share the weights of model and text encoder
    memory: Literal["whole", "idle", "blocks"] = "whole"  # idle: on the device is only what is at work; blocks: and of
    # the model at most two of its blocks
    vae_tile: int = 0  # edge of the VAE's tiles, in latents (of 8 x 8 pixels, 16 x 16 in Wan 2.2); 0: whole frames
    vae_overlap: int = 8  # of tiles, in latents
    compile: bool = False  # torch.compile the blocks
    out: str = "samples"  # folder for 000.mp4, 000.txt, ... and contact_sheet.png


# ---------------------------------------------------------------------------------------------------------------------
# Loading


@dataclass
class Components:
    """What stands around the DiT. The text encoder is big and often not needed (cached states): it loads when used."""

    vae: WanVAE
    image_encoder: CLIPVision | None
    text_config: object
    text_dtype: torch.dtype
    text_path: str
    tokenizer: Tokenizer
    layout: parallel.Layout
    memory: Memory
    sharded: bool  # do the ranks share the text encoder's weights?
    encoder: list = field(default_factory=list)
    known: dict[str, Tensor] = field(default_factory=dict)  # states of the prompts that were sampled already

    def encode_text(self, prompts: list[str]) -> Iterator[Tensor]:
        """Each prompt's states (n, text_dim) in float32 on the CPU, cut to its own length. Where the encoder is sharded
        all ranks call this, with equally many prompts, and take all that it yields."""
        if prompts and not self.encoder:
            with torch.device("meta"):
                encoder = UMT5Encoder(self.text_config).to(self.text_dtype)
            load = partial(load_weights, path=self.text_path, what="a umT5 encoder of this size")
            self.encoder.append(place(encoder, load, self.layout, self.memory, encoder.blocks, self.sharded))
        with self.memory.using(*self.encoder):
            for prompt in prompts:
                yield encode_prompts(self.encoder[0], self.tokenizer, [prompt])[0].float().cpu()

    def encode_for_all(self, prompts: list[str]) -> list[Tensor]:
        """The same prompts' states on every rank; all ranks call. Each prompt is encoded once, and the encoder's memory
        given back: the model needs it."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self.known]
        if self.sharded:
            states = list(self.encode_text(new))
        else:
            states = self.layout.on_rank_0(lambda: list(self.encode_text(new)))
        self.known.update(zip(new, states, strict=True))
        self.release_text_encoder()
        return [self.known[prompt] for prompt in prompts]

    def at_work(self):
        """A context in which VAE and CLIP tower can compute."""
        return self.memory.using(self.vae, *([] if self.image_encoder is None else [self.image_encoder]))

    def release_text_encoder(self):
        self.encoder.clear()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """(C, F, h, w) -> (3, T, H, W) in [-1, 1] on the CPU."""
        with self.at_work():
            return self.vae.decode(latents.to(next(self.vae.parameters()))).clamp(-1, 1).cpu()


def place(module: nn.Module, load, layout: parallel.Layout, memory: Memory, blocks=(), sharded=False) -> nn.Module:
    """The module, loaded and frozen, where --shard and --memory want it; load(module, device=...) fills it. One on the
    meta device gets memory for what this rank keeps of it, and no more."""
    module = module.eval().requires_grad_(False)
    if sharded:
        parallel.shard_frozen(module, blocks, layout)
    load(module, device=layout.device if sharded or memory.mode == "whole" else "cpu")
    return memory.keep(module, blocks)


def encoder_paths(config) -> dict[str, str]:
    """The weights files that --vae, --text-encoder, --tokenizer and --image-encoder name, the demo's where it has
    them."""
    if config.model not in PRESETS:
        raise ValueError(f"--model {config.model} is none of {', '.join(PRESETS)}")
    preset = PRESETS[config.model]
    files = {"vae": "vae22.safetensors" if preset.vae == "demo-2.2" else "vae.safetensors"}
    files |= {"text_encoder": "text_encoder.safetensors", "tokenizer": "tokenizer.model"}
    files |= {"image_encoder": "clip.safetensors"} if preset.image_encoder else {}
    return {name: path_of(config, name, file if preset.demo else "") for name, file in files.items()}


def paths_for(config) -> dict[str, str]:
    """The same, and the file that --checkpoint names."""
    shipped = "dit.safetensors" if config.model == "demo" else ""
    paths = encoder_paths(config) | {"checkpoint": path_of(config, "checkpoint", shipped)}
    check_experts(config, paths["checkpoint"])
    return paths


def path_of(config, name: str, shipped: str) -> str:
    """What an option for weights names, or the file that is shipped for it; ValueError where there is none."""
    flag, path = f"--{name.replace('_', '-')}", getattr(config, name) or (shipped and str(ASSETS / shipped))
    if not path:
        hint = " (to train: PATH or scratch)" if name == "checkpoint" else ""
        raise ValueError(f"--model {config.model} needs {flag} PATH{hint}")
    if path != "scratch" and not Path(path).expanduser().exists():
        raise ValueError(f"{flag} {path}: no such file or folder")
    return path


def check_experts(config, checkpoint: str):
    """ValueError unless the weights of both experts are named where there are two, and of one where there is one."""
    low = config.low_checkpoint
    if not PRESETS[config.model].boundary:
        if low:
            raise ValueError(f"--low-checkpoint {low}: --model {config.model} is one model; leave the option out")
    elif low not in ("", "scratch") and not Path(low).expanduser().exists():
        raise ValueError(f"--low-checkpoint {low}: no such file or folder")
    elif not low and checkpoint != "scratch" and getattr(config, "expert", "both") == "both":
        path = Path(checkpoint).expanduser()
        if expert_path(path, "low") == path:
            raise ValueError(
                f"--checkpoint {path} is not a folder that holds both experts; name the second with --low-checkpoint"
            )


def expert_checkpoint(config, expert: str) -> str:
    """The weights of one of the model's experts ("" where it is one model)."""
    path = (expert == "low" and config.low_checkpoint) or paths_for(config)["checkpoint"]
    return path if path == "scratch" else str(expert_path(path, expert))


def load_dit(config, expert: str, layout: parallel.Layout, memory: Memory) -> WanDiT:
    """A DiT in the dtype of --precision, with the LoRAs of its expert merged in."""
    with torch.device("meta"):
        model = WanDiT(CONFIGS[config.model]).to(DTYPES[config.precision])

    def load(model, device):
        load_weights(model, expert_checkpoint(config, expert), config.model, device)
        for text in config.lora_low if expert == "low" else config.lora:
            path, scale = split_scale(text)
            left = lora.merge(model, read_lora(path, expert), scale)
            if left and layout.rank == 0:
                print(f"{path}: no place in {config.model} for {left}", flush=True)

    model = place(model, load, layout, memory, model.blocks, config.shard == "full")
    if config.compile:
        for block in model.blocks:
            block.body = torch.compile(block.body)
    return model


def check_loras(config):
    """ValueError unless the LoRA files are there, and the model has the experts that they are for."""
    if config.lora_low and not PRESETS[config.model].boundary:
        raise ValueError(f"--lora-low: --model {config.model} is one model; name its LoRAs with --lora")
    for path, _ in map(split_scale, (*config.lora, *config.lora_low)):
        if not Path(path).expanduser().exists():
            raise ValueError(f"LoRA {path}: no such file or folder")


def split_scale(text: str) -> tuple[str, float]:
    """PATH or PATH:SCALE."""
    path, _, scale = text.rpartition(":")
    try:
        return (path, float(scale)) if path else (text, 1.0)
    except ValueError:
        return text, 1.0  # a colon of the path's own


def load_components(config, paths: dict[str, str], layout: parallel.Layout, memory: Memory) -> Components:
    """VAE, CLIP tower if the model has one, tokenizer and (later) text encoder of a model."""
    preset = PRESETS[config.model]
    shape = VAE_CONFIGS[preset.vae]
    vae = TiledVAE(shape, config.vae_tile, config.vae_overlap) if config.vae_tile else WanVAE(shape)
    vae = place(vae, partial(load_weights, path=paths["vae"], what=f"a VAE of kind {preset.vae}"), layout, memory)
    clip = None
    if preset.image_encoder:
        what = f"a CLIP vision tower of kind {preset.image_encoder}"
        load = partial(load_weights, path=paths["image_encoder"], what=what)
        clip = place(CLIPVision(CLIP_CONFIGS[preset.image_encoder]), load, layout, memory)
    tokenizer = Tokenizer(paths["tokenizer"], CONFIGS[config.model].text_len)
    text_config, sharded = UMT5_CONFIGS[preset.text_encoder], config.shard == "full" and layout.world > 1
    text_dtype = DTYPES[config.text_precision or ("fp32" if preset.demo else "bf16")]
    return Components(vae, clip, text_config, text_dtype, paths["text_encoder"], tokenizer, layout, memory, sharded)


# ---------------------------------------------------------------------------------------------------------------------
# Sampling


@dataclass
class Given:
    """What one video is made from besides its text, as tensors on the device; shape: of its latents."""

    shape: tuple[int, int, int, int]
    condition: Tensor | None = None  # (20, F, h, w)
    image: Tensor | None = None  # (1 or 2, 257, clip_dim)
    first: Tensor | None = None  # (C, 1, h, w), latent frame 0, where the model is given it clean

    def timesteps(self, t: float) -> Tensor:
        """What the model is told: t, and 0 of a frame that is given."""
        if self.first is None:
            return torch.tensor([t], dtype=torch.float64)
        return torch.tensor([0.0] + [t] * (self.shape[1] - 1), dtype=torch.float64)

    def put_back(self, latents: Tensor) -> Tensor:
        if self.first is None:
            return latents
        return torch.cat([self.first.to(latents.dtype), latents[:, 1:]], dim=1)


@torch.no_grad()
def generate(
    models: dict[str, WanDiT],
    texts: list[Tensor],
    negative: Tensor,
    given: list[Given],
    how: Sampling,
    noise: list[Tensor],
    dtype,
    boundary: float = 0.0,
    sp=LOCAL,
    memory: Memory = WHOLE,
) -> list[Tensor]:
    """Latents of one video per prompt, all in one pack.

    models {"": ...}, or {"high": ..., "low": ...} with the sigma from which up "high" is at work; texts
    [(n, text_dim)], negative (m, text_dim), noise float32 (C, F, h, w); dtype is the pass's. Guidance:
    v = v_negative + guidance * (v_prompt - v_negative) (Ho & Salimans 2022), two passes per step.
    """
    solvers = [SOLVERS[how.solver](how.steps, how.shift) for _ in texts]
    latents = [g.put_back(x) for g, x in zip(given, noise, strict=True)]
    pictures = {}
    if given[0].condition is not None:
        pictures["condition"] = [g.condition.to(dtype) for g in given]
    if given[0].image is not None:
        pictures["image"] = torch.cat([g.image for g in given]).to(dtype)

    def expert_of(i: int) -> str:
        return ("high" if solvers[0].timesteps[i] >= boundary * TIMESTEPS else "low") if boundary else ""

    for expert, steps in groupby(range(how.steps), expert_of):
        guidance = how.guidance_low if expert == "low" and how.guidance_low is not None else how.guidance
        model = models[expert]
        with memory.using(model):
            for i in steps:
                t = float(solvers[0].timesteps[i])
                inputs, timesteps = [x.to(dtype) for x in latents], [g.timesteps(t) for g in given]
                velocity = model(inputs, timesteps, texts, sp=sp, **pictures)
                if guidance != 1:
                    away = model(inputs, timesteps, [negative] * len(texts), sp=sp, **pictures)
                    velocity = [n + guidance * (v - n) for v, n in zip(velocity, away, strict=True)]
                updates = zip(solvers, velocity, latents, given, strict=True)
                latents = [g.put_back(solver.step(v.to(x.dtype), x, i)) for solver, v, x, g in updates]
    return latents


@dataclass
class Sampler:
    """Everything that turns requests into files."""

    models: dict[str, WanDiT]
    components: Components
    preset: Preset
    how: Sampling
    layout: parallel.Layout
    dtype: torch.dtype

    def write(self, requests: list[Request], seed: int, folder: Path) -> Path:
        """Write NNN.mp4 and NNN.txt per request and one contact sheet; every rank calls, and each writes its share."""
        folder.mkdir(parents=True, exist_ok=True)
        for i, video in self.videos(requests, seed):
            write_mp4(folder / f"{i:03d}.mp4", video, self.how.fps)
            (folder / f"{i:03d}.txt").write_text(requests[i].prompt, encoding="utf-8")
        self.layout.barrier()
        return self.layout.on_rank_0(sheet_of, folder, len(requests))

    def videos(self, requests: list[Request], seed: int, group: int = 8) -> Iterator[tuple[int, Tensor]]:
        """(number of the request, video (3, T, H, W) in [-1, 1]), each on one of the ranks.

        Data-parallel groups take every dp-th request, `group` at a time in one pack; groups that have none left go
        along with the first and drop it, since a sharded model's weights are gathered by all ranks together.
        """
        layout, memory = self.layout, self.components.memory
        encoded = self.components.encode_for_all([*(r.prompt for r in requests), self.how.negative])
        encoded = [states.to(layout.device, self.dtype) for states in encoded]
        for r in range(-(-len(requests) // (layout.dp * group))):
            mine = [i for i in range(len(requests)) if i % layout.dp == layout.dp_rank][r * group : (r + 1) * group]
            numbers = mine or [0]
            with self.components.at_work():
                given = [self.given(requests[i]) for i in numbers]
            noise = [self.noise(g.shape, seed, i) for i, g in zip(numbers, given, strict=True)]
            texts = [encoded[i] for i in numbers]
            boundary, sp, how = self.preset.boundary, layout.seam(), self.how
            latents = generate(self.models, texts, encoded[-1], given, how, noise, self.dtype, boundary, sp, memory)
            for i, x in zip(mine, latents, strict=False):
                if i // layout.dp % layout.sp == layout.sp_rank:  # they all have x: the decoding is divided
                    yield i, self.components.decode(x)

    def noise(self, shape, seed: int, i: int) -> Tensor:
        wide = torch.promote_types(self.dtype, torch.float32)
        return torch.randn(shape, generator=stream.generator(seed, i, "sample")).to(self.layout.device, wide)

    @torch.no_grad()
    def given(self, request: Request) -> Given:
        """Encode a request's pictures as the model wants them."""
        vae, kind, how = self.components.vae, self.preset.condition, self.how
        size = how.height, how.width
        if request.image is not None:
            multiple = vae.spatial * 2
            size = size_for(kind, *request.image.shape[:2], how.height * how.width, multiple)
        frames = vae.latent_frames(how.frames)
        result = Given((vae.config.z_dim, frames, size[0] // vae.spatial, size[1] // vae.spatial))
        if request.image is None:
            return result
        weight = next(vae.parameters())
        first = prepared(request.image, kind, size).to(weight)
        if kind == "first-latent":
            result.first = vae.encode(first)
            return result
        last = None if request.last_image is None else prepared(request.last_image, kind, size).to(weight)
        result.condition = with_mask(vae.encode(padded(first, how.frames, last)), kind)
        if self.components.image_encoder is not None:  # it sees the pictures in their own size
            pictures = [p for p in (request.image, request.last_image) if p is not None]
            result.image = self.components.image_encoder.encode([to_unit(p)[:, None].to(weight) for p in pictures])
        return result


def sheet_of(folder: Path, count: int, most: int = 32) -> Path:
    """The contact sheet of a folder's first videos, read back from the files as anyone would see them."""
    videos = [read_mp4(folder / f"{i:03d}.mp4") for i in range(min(count, most))]
    contact_sheet(folder / "contact_sheet.png", videos)
    return folder / "contact_sheet.png"


def sampling_for(config) -> Sampling:
    """The model's defaults with what the command line changes."""
    if config.model not in PRESETS:
        raise ValueError(f"--model {config.model} is none of {', '.join(PRESETS)}")
    preset = PRESETS[config.model]
    names = {"steps": "sampling_steps", "negative": "negative_prompt"}
    given = {name: getattr(config, names.get(name, name)) for name in Sampling.__dataclass_fields__}
    how = replace(preset.sampling, **{name: value for name, value in given.items() if value is not None})
    spatial, patch = VAE_CONFIGS[preset.vae].spatial, CONFIGS[config.model].patch_size[1]
    for name in ("height", "width"):
        edge = getattr(how, name)
        if edge % (spatial * patch) or edge < 1:
            factors = f"{spatial * patch} ({spatial} of the VAE, {patch} of the patches)"
            raise ValueError(f"--{name} {edge} is not a multiple of {factors}")
    if how.frames % 4 != 1 or how.frames < 1:
        raise ValueError(
            f"--frames {how.frames} is not of the form 4n + 1; use {max(1, (how.frames - 1) // 4 * 4 + 1)}"
        )
    if preset.condition == "first-last" and how.frames < 5:
        raise ValueError(f"--frames {how.frames} leaves nothing between the first and the last frame; use 5 or more")
    if config.guidance_low is not None and not preset.boundary:
        raise ValueError(f"--guidance-low: --model {config.model} is one model; its guidance is --guidance")
    if how.steps < 1:
        raise ValueError(f"--sampling-steps {how.steps} is less than 1")
    return how


def main(config: Config):
    how, paths = sampling_for(config), paths_for(config)
    check_loras(config)
    requests, preset, wan = requests_of(config), PRESETS[config.model], CONFIGS[config.model]
    _, world = parallel.world_from_torchrun()
    if config.memory == "blocks" and config.shard == "full" and world > 1:
        raise ValueError(
            "--memory blocks streams whole blocks, --shard full splits them: use --memory idle, or no --shard"
        )
    layout = parallel.start(*parallel.split_sp(world, wan.num_heads, config.sp, config.ulysses, config.ring))
    dtype = DTYPES[config.precision]
    memory, models = Memory(config.memory, layout.device), {}
    components = load_components(config, paths, layout, memory)
    for expert in preset.experts:
        models[expert] = load_dit(config, expert, layout, memory)
    sampler = Sampler(models, components, preset, how, layout, dtype)
    sheet = sampler.write(requests, config.seed, Path(config.out))
    if layout.rank == 0:
        print(f"{len(requests)} videos in {config.out}, all on one page in {sheet}")


if __name__ == "__main__":
    try:
        main(parse(Config, sys.argv[1:], __doc__))
        parallel.stop()
    except (ValueError, RuntimeError, OSError) as error:
        exit_with("sample.py", error, parallel.first_on_this_machine())
