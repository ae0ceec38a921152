"""Text to video: load the models, integrate the flow, decode, write mp4 files and a contact sheet.

    python sample.py --prompt "a red circle moves left over a dark ground"
    torchrun --nproc-per-node 4 sample.py --sp 4 --model wan2.1-t2v-14b --checkpoint ... --prompt ...

Sequence-parallel ranks compute one video together, data-parallel ones divide the prompts. The noise of prompt i is a
function of (seed, i) alone, so the videos do not depend on the number of processes.
"""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

import demo
import parallel
import stream
from flow import DPMSolver, Euler, UniPC
from model import CONFIGS, LOCAL, WanDiT
from options import exit_with, parse
from text_encoder import UMT5_CONFIGS, Tokenizer, UMT5Encoder, encode_prompts
from vae import VAE_CONFIGS, WanVAE
from video import contact_sheet, read_mp4, write_mp4
from weights import load_weights

ASSETS = Path(__file__).resolve().parent / "assets"
SOLVERS = {"unipc": UniPC, "euler": Euler, "dpm++": DPMSolver}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}

# The released pipelines' negative prompt (Wan2.1 wan/configs/shared_config.py): what to steer away from.
NEGATIVE = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，残缺的，"
    "多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，"
    "背景人很多，倒着走"
)


@dataclass(frozen=True)
class Sampling:
    """How a model is meant to be sampled: released defaults (Wan2.1 generate.py), and ours for the demo."""

    height: int = 480
    width: int = 832
    frames: int = 81
    fps: int = 16
    steps: int = 50
    shift: float = 5.0
    guidance: float = 5.0
    negative: str = NEGATIVE
    solver: str = "unipc"


SAMPLING = {
    "demo": Sampling(64, 64, 17, 16, steps=20, shift=3.0, guidance=3.0, negative=""),
    "wan2.1-t2v-1.3b": Sampling(),
    "wan2.1-t2v-14b": Sampling(720, 1280),
}


@dataclass(frozen=True)
class Config:
    model: str = "demo"  # preset, see CONFIGS in model.py
    checkpoint: str = ""  # weights of the model: a file or a folder; empty: the demo's
    vae: str = ""  # weights of the VAE; empty: the demo's
    text_encoder: str = ""  # weights of the umT5 encoder; empty: the demo's
    tokenizer: str = ""  # SentencePiece file (google/umt5-xxl/spiece.model); empty: the demo's
    prompt: tuple[str, ...] = ()  # one or more prompts, each in quotes
    prompts: str = ""  # a file with one prompt per line
    negative_prompt: str | None = None  # what guidance steers away from; default: the released one, "" for the demo
    solver: Literal["unipc", "euler", "dpm++"] | None = None  # default: the model's own, as for all options below
    sampling_steps: int | None = None  # solver steps
    shift: float | None = None  # of the noise schedule towards noise
    guidance: float | None = None  # classifier-free guidance scale; 1 turns it off
    height: int | None = None  # pixels
    width: int | None = None  # pixels
    frames: int | None = None  # of the video, 4n + 1
    fps: int | None = None  # of the file
    seed: int = 0  # of the noise
    sp: int = 0  # sequence-parallel processes per video; 0: all that --ulysses and --ring say, or 1
    ulysses: int = 0  # of which by all-to-all over heads; 0: the largest number that divides sp and the heads
    ring: int = 0  # of which by a ring of keys and values; 0: the rest
    precision: Literal["fp64", "fp32", "bf16"] = "fp32"  # of the model's pass; the VAE runs in float32
    out: str = "samples"  # folder for 000.mp4, 000.txt, ... and contact_sheet.png


# ---------------------------------------------------------------------------------------------------------------------
# Loading


@dataclass
class Components:
    """What stands around the DiT. The text encoder is big and often not needed (cached states): it loads when used."""

    vae: WanVAE
    text_config: object
    text_path: str
    tokenizer: Tokenizer
    device: torch.device
    encoder: list = field(default_factory=list)

    def encode_text(self, prompts: list[str]) -> list[Tensor]:
        """[(n, text_dim)] in float32 on the CPU, cut to each prompt's own length."""
        if not self.encoder:
            encoder = load_weights(UMT5Encoder(self.text_config), self.text_path, "a umT5 encoder of this size")
            self.encoder.append(encoder.to(self.device).eval().requires_grad_(False))
        return [states.float().cpu() for states in encode_prompts(self.encoder[0], self.tokenizer, prompts)]

    def release_text_encoder(self):
        self.encoder.clear()


def paths_for(config) -> dict[str, str]:
    """The weights files that --checkpoint, --vae, --text-encoder and --tokenizer name, the demo's where it has them."""
    if config.model not in CONFIGS:
        raise ValueError(f"--model {config.model} is none of {', '.join(CONFIGS)}")
    files = {"vae": "vae.safetensors", "text_encoder": "text_encoder.safetensors", "tokenizer": "tokenizer.model"}
    files["checkpoint"] = "dit.safetensors"
    paths = {}
    for name, file in files.items():
        paths[name] = getattr(config, name) or (str(ASSETS / file) if config.model == "demo" else "")
        if not paths[name]:
            hint = " (or: scratch)" if name == "checkpoint" else ""
            raise ValueError(f"--model {config.model} needs --{name.replace('_', '-')} PATH{hint}")
        if paths[name] != "scratch" and not Path(paths[name]).expanduser().exists():
            raise ValueError(f"--{name.replace('_', '-')} {paths[name]}: no such file or folder")
    return paths


def load_components(config, paths: dict[str, str], device: torch.device) -> Components:
    """VAE, tokenizer and (later) text encoder of a model."""
    small = config.model == "demo"
    vae = load_weights(WanVAE(VAE_CONFIGS["demo" if small else "wan2.1"]), paths["vae"], "a Wan 2.1 VAE")
    wan, text_config = CONFIGS[config.model], UMT5_CONFIGS["demo" if small else "umt5-xxl"]
    tokenizer = Tokenizer(paths["tokenizer"], wan.text_len)
    vae = vae.to(device).eval().requires_grad_(False)
    return Components(vae, text_config, paths["text_encoder"], tokenizer, device)


# ---------------------------------------------------------------------------------------------------------------------
# Sampling


@torch.no_grad()
def generate(
    model, texts: list[Tensor], negative: Tensor, shape, how: Sampling, noise: list[Tensor], dtype, sp=LOCAL
) -> list[Tensor]:
    """Latents of one video per prompt, all in one pack.

    texts [(n, text_dim)], negative (m, text_dim), noise one float32 (C, F, H, W) = shape per prompt; dtype is the
    pass's. Guidance: v = v_negative + guidance * (v_prompt - v_negative) (Ho & Salimans 2022), two passes per step.
    """
    solvers = [SOLVERS[how.solver](how.steps, how.shift) for _ in texts]
    latents = list(noise)
    for i in range(how.steps):
        timesteps = [solvers[0].timesteps[i]] * len(texts)
        inputs = [x.to(dtype) for x in latents]
        velocity = model(inputs, timesteps, texts, sp=sp)
        if how.guidance != 1:
            away = model(inputs, timesteps, [negative] * len(texts), sp=sp)
            velocity = [n + how.guidance * (v - n) for v, n in zip(velocity, away, strict=True)]
        steps = zip(solvers, velocity, latents, strict=True)
        latents = [solver.step(v.to(x.dtype), x, i) for solver, v, x in steps]
    return latents


def sample_videos(model, components, prompts, how: Sampling, seed: int, folder: Path, layout, dtype, group: int = 8):
    """Write NNN.mp4 and NNN.txt per prompt and one contact sheet; every rank calls, and each writes its share.

    Data-parallel groups take every dp-th prompt, `group` at a time in one pack; groups that have none left go along
    with the first prompt and drop it, since a sharded model's weights are gathered by all ranks together.
    """
    encoded = layout.on_rank_0(components.encode_text, [*prompts, how.negative])
    encoded = [states.to(layout.device, dtype) for states in encoded]
    vae, sp = components.vae, layout.seam()
    frames = vae.latent_frames(how.frames)
    shape = (vae.config.z_dim, frames, how.height // vae.spatial, how.width // vae.spatial)
    folder.mkdir(parents=True, exist_ok=True)
    wide = torch.promote_types(dtype, torch.float32)
    rounds = -(-len(prompts) // (layout.dp * group))
    for r in range(rounds):
        mine = [i for i in range(len(prompts)) if i % layout.dp == layout.dp_rank][r * group : (r + 1) * group]
        numbers = mine or [0]
        noise = [
            torch.randn(shape, generator=stream.generator(seed, i, "sample")).to(layout.device, wide) for i in numbers
        ]
        latents = generate(model, [encoded[i] for i in numbers], encoded[-1], shape, how, noise, dtype, sp)
        for i, x in zip(mine, latents, strict=False):
            if i // layout.dp % layout.sp == layout.sp_rank:  # every rank of the group has x: decoding is divided
                with torch.no_grad():
                    video = vae.decode(x.float()).clamp(-1, 1).cpu()
                write_mp4(folder / f"{i:03d}.mp4", video, how.fps)
                (folder / f"{i:03d}.txt").write_text(prompts[i])
    layout.barrier()
    return layout.on_rank_0(sheet_of, folder, len(prompts))


def sheet_of(folder: Path, count: int, most: int = 32) -> Path:
    """The contact sheet of a folder's first videos, read back from the files as anyone would see them."""
    videos = [read_mp4(folder / f"{i:03d}.mp4") for i in range(min(count, most))]
    contact_sheet(folder / "contact_sheet.png", videos)
    return folder / "contact_sheet.png"


def sampling_for(config) -> Sampling:
    """The model's defaults with what the command line changes."""
    if config.model not in SAMPLING:
        raise ValueError(f"sampling --model {config.model} needs more than text; it does for {', '.join(SAMPLING)}")
    names = {"steps": "sampling_steps", "negative": "negative_prompt"}
    given = {name: getattr(config, names.get(name, name)) for name in Sampling.__dataclass_fields__}
    how = replace(SAMPLING[config.model], **{name: value for name, value in given.items() if value is not None})
    for name in ("height", "width"):
        if getattr(how, name) % 16 or getattr(how, name) < 16:
            raise ValueError(f"--{name} {getattr(how, name)} is not a multiple of 16 (8 of the VAE, 2 of the patches)")
    if how.frames % 4 != 1 or how.frames < 1:
        raise ValueError(
            f"--frames {how.frames} is not of the form 4n + 1; use {max(1, (how.frames - 1) // 4 * 4 + 1)}"
        )
    if how.steps < 1:
        raise ValueError(f"--sampling-steps {how.steps} is less than 1")
    return how


def prompts_of(config) -> list[str]:
    prompts = list(config.prompt)
    if config.prompts:
        file = Path(config.prompts).expanduser()
        if not file.is_file():
            raise ValueError(f"--prompts {file}: no such file")
        prompts += [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    if not prompts and config.model == "demo":
        prompts = list(demo.HELD_OUT_PROMPTS)
    if not prompts:
        raise ValueError('nothing to sample: give --prompt "..." or --prompts FILE')
    return prompts


def main(config: Config):
    how, prompts, paths = sampling_for(config), prompts_of(config), paths_for(config)
    _, world = parallel.world_from_torchrun()
    wan = CONFIGS[config.model]
    layout = parallel.start(*parallel.split_sp(world, wan.num_heads, config.sp, config.ulysses, config.ring))
    dtype = DTYPES[config.precision]
    components = load_components(config, paths, layout.device)
    model = WanDiT(wan)
    load_weights(model, paths["checkpoint"], config.model)
    model = model.to(layout.device, dtype).eval()
    sheet = sample_videos(model, components, prompts, how, config.seed, Path(config.out), layout, dtype)
    if layout.rank == 0:
        print(f"{len(prompts)} videos in {config.out}, all on one page in {sheet}")


if __name__ == "__main__":
    try:
        main(parse(Config, sys.argv[1:], __doc__))
        parallel.stop()
    except (ValueError, RuntimeError, OSError) as error:
        exit_with("sample.py", error, parallel.world_from_torchrun()[0])
