"""Make the demo's small weights: a tokenizer, a umT5 encoder, Wan's two VAEs and a CLIP tower for its clips.

    python tools/make_demo_assets.py [--out assets] [--parts tokenizer text vae vae22 clip]

The trainer's demo needs stand-ins for the released text encoder (11 GB), VAEs (0.5 and 2.8 GB) and image encoder
(1.3 GB). They have the released structure and parameter names, only smaller; the 2.2 VAE also has one residual block
per stage fewer. All but the image encoder are trained here from nothing, on the captions and clips of the demo's
training scenes. Measured on held-out scenes, which take no part:

    tokenizer.model           101 pieces; captions are 13 to 29 tokens
    text_encoder.safetensors  90 k parameters, about a minute; all four words can be read from every token's state
    vae.safetensors           924 k parameters, 634 s on one core; 17-frame clips come back with a PSNR of 30.7 dB,
                              with 30.4 dB where their latents carry noise of 0.3 standard deviations
    vae22.safetensors         581 k parameters in float16, 801 s (two rounds); 30.1 dB, and 29.8 dB with that noise, the
                              first frame 0.2 dB below the second. Its squares are so round that demo_score.py takes
                              most of them for circles: the shape of 23 clips of 32 is read right, where vae.safetensors
                              keeps all 32; colour and direction are right in every clip of both
    clip.safetensors          52 k parameters in float16, seeded and not trained, some seconds; a linear probe reads
                              from a first or last frame colour and ground always, the shape 94 times of 100, and the
                              shape's centre to 2.3 pixels

Every part begins from fixed seeds (0, a later round of a VAE from its number), so it does not matter which others are
made with it; text alone needs the tokenizer.

Letters: S samples, L tokens, C channels, T frames, F latent frames, H and W height and width.
"""

import argparse
import contextlib
import io
import math
import string
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from demo_score import centroids

from demo import (
    COLOURS,
    DIRECTIONS,
    GROUNDS,
    HELD_OUT_SCENES,
    SHAPES,
    SIZE,
    TRAINING_SCENES,
    WORDINGS,
    Scene,
    draw,
)
from image_encoder import CLIP_CONFIGS, CLIPVision
from text_encoder import UMT5_CONFIGS, Tokenizer, UMT5Encoder
from vae import VAE_CONFIGS, Cache, Downsample, ResidualBlock, Upsample, WanVAE

ASSETS = Path(__file__).resolve().parent.parent / "assets"
WORDS = {"colour": list(COLOURS), "shape": list(SHAPES), "direction": list(DIRECTIONS), "ground": list(GROUNDS)}
SEEN = ("colour", "shape", "ground")  # the words that a single picture shows
TEXT_LEN = 32  # of the demo DiT
NOISE = 0.3  # most noise that the decoder learns to forgive, in standard deviations of the latents


@dataclass(frozen=True)
class Round:
    """One fall of the learning rate from its peak; the first starts from nothing, a later one from the file."""

    stages: tuple[tuple[int, int, int], ...]  # steps, clips per step, frames per clip
    rate: float = 5e-3  # peak, of the kernels
    squares: float = 4  # weight of the squared error, beside 1 of the absolute one


@dataclass(frozen=True)
class Recipe:
    """How a VAE is trained and stored."""

    config: str  # of VAE_CONFIGS
    rounds: tuple[Round, ...]
    dtype: torch.dtype  # of the file


VAES = {
    "vae": Recipe("demo", (Round(((600, 4, 1), (300, 2, 5), (300, 2, 17))),), torch.float32),
    # After its first round this one's clips came back with 29.5 dB, and of 32 held-out ones the shape of 21 was read
    # right; the second brought 30.1 dB and 23.
    "vae22": Recipe(
        "demo-2.2",
        (Round(((600, 4, 1), (900, 2, 5), (900, 2, 17))), Round(((900, 2, 17),), rate=2.5e-3, squares=16)),
        torch.float16,
    ),
}


def make_tokenizer(path: Path) -> None:
    """A SentencePiece model with umT5's special ids. It lowers the case and knows every other printable ASCII
    character, so any such prompt tokenizes without unknown tokens; what room is left holds the captions' words."""
    captions = [scene.caption(i) for scene in TRAINING_SCENES for i in range(len(WORDINGS))]
    path, model = path.resolve(), io.BytesIO()
    lower = "".join(f"{ord(letter):X}\t{ord(letter.lower()):X}\n" for letter in string.ascii_uppercase)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # the model keeps the rules' file name
        Path("lower.tsv").write_text(lower)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(captions),
            model_writer=model,
            model_type="unigram",
            vocab_size=UMT5_CONFIGS["demo"].vocab,
            hard_vocab_limit=False,
            normalization_rule_tsv="lower.tsv",
            required_chars="".join(c for c in map(chr, range(33, 127)) if not c.isupper()),
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    path.write_bytes(model.getvalue())


def random_caption(rng: np.random.Generator, scenes: list[Scene]) -> tuple[str, list[int]]:
    """A caption and, per kind of word, the number of its word, or one past the last where it names none. A fifth of the
    captions have lost words, up to all of them, so that also a shorter prompt and the empty one mean something."""
    words = scenes[rng.integers(len(scenes))].caption(int(rng.integers(len(WORDINGS)))).replace(",", " ,").split()
    if rng.random() < 0.2:
        keep = rng.random()
        words = [word for word in words if rng.random() < keep]
    named = [[names.index(word) for word in words if word in names] for names in WORDS.values()]
    labels = [found[0] if found else len(names) for found, names in zip(named, WORDS.values(), strict=True)]
    return " ".join(words).replace(" ,", ","), labels


def train_text_encoder(path: Path, tokenizer: Tokenizer, steps: int = 1500, batch: int = 64) -> None:
    """Teaches every token's state what the whole caption says: four linear heads read colour, shape, direction and
    ground from it, a fifth reads which token it is; the heads are then thrown away. Only training scenes' captions."""
    torch.manual_seed(0)
    rng, config = np.random.default_rng(0), UMT5_CONFIGS["demo"]
    encoder = UMT5Encoder(config)
    heads = nn.ModuleList(
        nn.Linear(config.dim, n) for n in (*(len(names) + 1 for names in WORDS.values()), config.vocab)
    )
    optimizer = torch.optim.AdamW([*encoder.parameters(), *heads.parameters()], lr=2e-3, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
    for step in range(steps):
        captions, labels = zip(*(random_caption(rng, TRAINING_SCENES) for _ in range(batch)), strict=True)
        ids, mask = tokenizer(list(captions))  # (S, L)
        states = encoder(ids, mask)[mask.bool()]  # (tokens, C)
        of_caption = torch.tensor(labels).repeat_interleave(mask.sum(1), 0)  # (tokens, 4)
        targets = [*of_caption.unbind(1), ids[mask.bool()]]
        loss = sum(nn.functional.cross_entropy(head(states), y) for head, y in zip(heads, targets, strict=True))
        loss.backward()
        nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 500 == 0:
            print(f"text {step + 1}/{steps}: loss {loss.item():.3f}", flush=True)
    with torch.no_grad():
        prompts = [(scene, scene.caption(i)) for scene in HELD_OUT_SCENES for i in range(len(WORDINGS))]
        ids, mask = tokenizer([caption for _, caption in prompts])
        for head, (kind, names) in zip(heads, WORDS.items(), strict=False):
            y = torch.tensor([names.index(getattr(scene, kind)) for scene, _ in prompts])[:, None]
            right = (head(encoder(ids, mask)).argmax(-1) == y)[mask.bool()].to(torch.float32).mean()
            print(f"text: {kind} right in {100 * right:.1f} % of the tokens of held-out scenes' captions", flush=True)
    save_file(encoder.state_dict(), path)


def pictures(rng: np.random.Generator, scenes: list[Scene], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """First or last frames (n, 3, 1, H, W) in [-1, 1] of random clips, as image-to-video gets them; the numbers of
    their colour, shape and ground (n, 3); the shape's centre as (y, x) (n, 2), 0 in the middle and 1 at the edge."""
    frames, labels, centres = [], [], []
    for _ in range(count):
        scene = scenes[rng.integers(len(scenes))]
        frame = draw(scene, rng, frames=2)[rng.integers(2)] / 255  # (H, W, 3)
        cover = np.abs(frame - GROUNDS[scene.ground]).sum(-1) - 0.01  # of the ground a byte's rounding is left
        frames.append(np.moveaxis(frame, -1, 0)[:, None] * 2 - 1)
        labels.append([WORDS[kind].index(getattr(scene, kind)) for kind in SEEN])
        centres.append(centroids(cover.clip(0)[None])[0] / (SIZE / 2) - 1)
    return (
        torch.from_numpy(np.stack(frames)).to(torch.float32),
        torch.tensor(labels),
        torch.from_numpy(np.stack(centres)).to(torch.float32),
    )


def linear_probe(seen: Tensor, targets: Tensor, new: Tensor) -> Tensor:
    """What ridge regression from states (n, L, C) to targets (n, K) reads in new states (m, L, C): (m, K)."""
    seen, new, targets = (x.flatten(1).to(torch.float64) for x in (seen, new, targets))
    std, mean = torch.std_mean(seen, 0)
    seen, new = (seen - mean) / std, (new - mean) / std
    kernel = seen @ seen.T + 0.01 * seen.shape[1] * torch.eye(len(seen), dtype=seen.dtype)
    middle = targets.mean(0)
    return new @ seen.T @ torch.linalg.solve(kernel, targets - middle) + middle


def probe_image_encoder(encoder: CLIPVision, seen: int, new: int) -> dict[str, float]:
    """How much of a picture can be read linearly from its states: the share of held-out scenes' pictures whose colour,
    shape and ground are right, and the centre's error in pixels (root mean square of either axis)."""
    pixels, labels, centres = pictures(np.random.default_rng(0), TRAINING_SCENES, seen)
    new_pixels, new_labels, new_centres = pictures(np.random.default_rng(1), HELD_OUT_SCENES, new)
    with torch.no_grad():
        states, new_states = (torch.cat([encoder.encode(list(x)) for x in p.split(64)]) for p in (pixels, new_pixels))
    one_hot = [nn.functional.one_hot(labels[:, i], len(WORDS[kind])) for i, kind in enumerate(SEEN)]  # (n, words) each
    targets = torch.cat([*one_hot, centres], 1)
    *scores, where = linear_probe(states, targets, new_states).split([*(y.shape[1] for y in one_hot), 2], 1)
    right = {
        kind: (score.argmax(1) == new_labels[:, i]).to(torch.float32).mean().item()
        for i, (kind, score) in enumerate(zip(SEEN, scores, strict=True))
    }
    return right | {"centre": SIZE / 2 * (where - new_centres).square().mean().sqrt().item()}


def make_image_encoder(path: Path) -> None:
    """A tower that nothing has trained. A quarter of its patch filters are random and see mostly the patch's colour.
    The others are made smooth, blind to colour and blind to flat patches, so they see edges and which way these run:
    without them the probe below knows the shape of 66 % of the pictures, with them of 94 %."""
    torch.manual_seed(0)
    encoder = CLIPVision(CLIP_CONFIGS["demo"])
    edges = encoder.visual.patch_embedding.weight.data[encoder.config.dim // 4 :]  # (C, 3, p, p)
    smooth = nn.functional.avg_pool2d(edges.mean(1, keepdim=True), 3, 1, 1)
    edges.copy_(10 * (smooth - smooth.mean((2, 3), keepdim=True)))  # edges weigh as much as colours then
    save_file({name: p.to(torch.float16) for name, p in encoder.state_dict().items()}, path)
    encoder.load_state_dict(load_file(path))
    found = probe_image_encoder(encoder, seen=1000, new=256)
    shares = ", ".join(f"{kind} {100 * found[kind]:.1f} %" for kind in SEEN)
    print(f"clip: read linearly from held-out scenes' pictures: {shares}; centre to {found['centre']:.1f} pixels")


def cut_batch(rng: np.random.Generator, pool: list[np.ndarray], clips: int, frames: int) -> Tensor:
    """(S, 3, T, H, W) in [-1, 1]: clips of the pool, each from a random frame on."""
    batch = []
    for _ in range(clips):
        video = pool[rng.integers(len(pool))]  # (17, H, W, 3)
        first = int(rng.integers(len(video) - frames + 1))
        batch.append(np.moveaxis(video[first : first + frames], -1, 0).astype(np.float32) / 127.5 - 1)
    return torch.from_numpy(np.stack(batch))


def start_weights(vae: WanVAE) -> None:
    """Weights to train from: every residual block starts as its shortcut, and time passes through: a convolution sees
    the newest frame alone, halving time keeps every second frame, doubling it repeats each. So the first stage can
    train on single frames, 17 times as many of them per second, and the later ones begin with a working picture VAE."""
    for layer in vae.modules():
        if isinstance(layer, nn.Conv2d | nn.Conv3d):
            newest = layer.weight.data[:, :, -1:] if isinstance(layer, nn.Conv3d) else layer.weight.data
            nn.init.zeros_(layer.weight)
            nn.init.normal_(newest, std=newest[0].numel() ** -0.5)
            nn.init.zeros_(layer.bias)
    for layer in vae.modules():
        if isinstance(layer, ResidualBlock):
            nn.init.zeros_(layer.residual[-1].weight)
        if isinstance(layer, Downsample | Upsample) and layer.time_conv is not None:
            weight = layer.time_conv.weight.data  # (C or 2C, C, 3, 1, 1)
            nn.init.zeros_(weight)
            weight[:, :, -1, 0, 0] = torch.eye(weight.shape[1]).repeat(len(weight) // weight.shape[1], 1)


def channels_last(module: nn.Module) -> nn.Module:
    """Lays convolution weights out with their channels innermost, which is faster on a CPU."""
    for p in module.parameters():
        if p.ndim >= 4:
            p.data = p.data.contiguous(memory_format=torch.channels_last if p.ndim == 4 else torch.channels_last_3d)
    return module


class Muon:
    """Momentum whose direction is replaced by the nearest orthogonal matrix (Jordan et al. 2024), for convolution
    kernels as (C', C * window) matrices. After 400 steps on single frames it stood 4.6 dB above AdamW here."""

    def __init__(self, parameters: list[nn.Parameter], momentum: float = 0.9):
        self.parameters, self.momentum = parameters, momentum
        self.velocity = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for p, velocity in zip(self.parameters, self.velocity, strict=True):
            if p.grad is None:  # time convolutions while there are only single frames
                continue
            velocity.mul_(self.momentum).add_(p.grad)
            x = (p.grad + self.momentum * velocity).movedim(1, -1)  # (C', window, C): channels_last order
            shape, x = x.shape, x.flatten(1)
            gain = max(1, x.shape[0] / x.shape[1]) ** 0.5
            x = x / (x.norm() + 1e-7)
            for _ in range(5):  # Newton-Schulz: drives all singular values towards 1
                a = x @ x.mT
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
            p.add_(x.view(shape).movedim(-1, 1), alpha=-lr * gain)
            p.grad = None


def latents_of(vae: WanVAE, video: Tensor) -> Tensor:
    """(S, 3, T, H, W) -> the mean of the latents (S, z, F, h, w), not normalised."""
    return vae.conv1(vae.encoder(video, Cache())).chunk(2, 1)[0]


class Statistics:
    """Running mean and variance (z, 1, 1, 1) of each latent channel. Not those of the batch: two clips' own mean would
    take the colour of their grounds out of the latents."""

    def __init__(self, channels: int, steps: int):
        self.mean, self.var = torch.zeros(channels, 1, 1, 1), torch.ones(channels, 1, 1, 1)
        self.steps = steps  # that have made them what they are

    def update(self, latents: Tensor) -> None:
        """Take in latents (S, z, F, h, w); the memory grows to 100 steps."""
        var, mean = (x[:, None, None, None] for x in torch.var_mean(latents.detach(), (0, 2, 3, 4), correction=0))
        keep = min(0.99, self.steps / (self.steps + 5))
        delta = mean - self.mean
        self.var = keep * (self.var + (1 - keep) * delta**2) + (1 - keep) * var
        self.mean = self.mean + (1 - keep) * delta
        self.steps += 1

    def scale(self) -> Tensor:
        return (self.var + 1e-6).rsqrt()


def train_vae(path: Path, recipe: Recipe, number: int, report: int = 100) -> None:
    """Round `number` of a recipe: reconstruction through noisy latents.

    Each latent channel is brought to mean 0 and variance 1 by running statistics, then noise of a random strength up to
    NOISE is added, and a small penalty keeps the encoder from outrunning the statistics. With a fixed power per channel
    it can beat the noise only by spreading what it knows evenly, so all channels carry something, close latents mean
    close pictures, and a small DiT's small errors decode to clean frames. The released VAE's KL term does the same.
    """
    torch.manual_seed(number)
    rng, this = np.random.default_rng(number), recipe.rounds[number]
    pool = [draw(scene, rng) for scene in TRAINING_SCENES for _ in range(4)]
    vae = WanVAE(VAE_CONFIGS[recipe.config]).requires_grad_(True)
    if number == 0:
        start_weights(vae)
    else:
        vae.load_state_dict(load_file(path))
    channels_last(vae)
    average = {name: p.detach().clone() for name, p in vae.named_parameters()}
    kernels = Muon([p for p in vae.parameters() if p.ndim >= 4 and p[0].numel() > 1])
    matrices = set(map(id, kernels.parameters))
    vectors = [p for p in vae.parameters() if id(p) not in matrices]
    others = torch.optim.AdamW(vectors, betas=(0.9, 0.99), weight_decay=0)
    statistics = Statistics(vae.config.z_dim, steps=100 * number)  # a file's latents are normalised
    plan = [stage[1:] for stage in this.stages for _ in range(stage[0])]
    start = time.process_time()
    for step, (clips, frames) in enumerate(plan):
        progress = min(1, (step + 1) / 30) * (0.02 + 0.98 * math.cos(math.pi / 2 * step / len(plan)) ** 2)
        others.param_groups[0]["lr"] = 0.6 * this.rate * progress
        video = cut_batch(rng, pool, clips, frames).contiguous(memory_format=torch.channels_last_3d)
        latents = latents_of(vae, video + 0.02 * torch.randn_like(video))
        statistics.update(latents)
        latents = (latents - statistics.mean) * statistics.scale()
        noise = NOISE * torch.rand(clips, 1, 1, 1, 1) * torch.randn_like(latents)
        error = vae.decoder(vae.conv2(latents + noise), Cache()) - video
        loss = error.abs().mean() + this.squares * error.square().mean() + 1e-3 * latents.square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        kernels.step(this.rate * progress)
        others.step()
        others.zero_grad()
        decay = min(0.99, step / (step + 10))
        for name, p in vae.named_parameters():
            average[name].lerp_(p.detach(), 1 - decay)
        if (step + 1) % report == 0 or step + 1 == len(plan):
            psnr = save_vae(path, recipe, average, statistics, clips=32 if step + 1 == len(plan) else 8)
            took = f"{time.process_time() - start:.0f} s of one core"
            print(
                f"{path.stem}, round {number}, {step + 1}/{len(plan)}: {loss.item():.4f}, held-out: {psnr}, {took}",
                flush=True,
            )


@torch.no_grad()
def save_vae(path: Path, recipe: Recipe, weights: dict[str, Tensor], statistics: Statistics, clips: int) -> str:
    """Normalise the latents, save the weights, and report the PSNR of clips of held-out scenes, plain and with noise;
    also that of the first frame, which is a latent frame of its own, beside the second's.

    The decoder was trained behind the running statistics. The latents of a sample of clips get mean 0 and variance 1
    by scaling the two 1 x 1 x 1 convolutions between encoder and decoder, so this VAE's latents are normalised as they
    come, and its configuration holds zeros and ones. The log-variance, which nothing has trained, is set to that of the
    noise.
    """
    vae = WanVAE(VAE_CONFIGS[recipe.config])
    vae.load_state_dict(weights)
    channels_last(vae)
    rng, z = np.random.default_rng(1), vae.config.z_dim
    seen = [draw(TRAINING_SCENES[i], rng) for i in rng.permutation(len(TRAINING_SCENES))[: 2 * clips]]
    new = [draw(scene, rng) for scene in HELD_OUT_SCENES[:clips]]
    seen, new = (torch.from_numpy(np.stack(x)).movedim(-1, 1) / 127.5 - 1 for x in (seen, new))  # (S, 3, T, H, W)
    found_var, found_mean = torch.var_mean(torch.cat([latents_of(vae, part) for part in seen.split(4)]), (0, 2, 3, 4))
    scale, trained_scale = found_var.rsqrt(), statistics.scale().flatten()
    vae.conv1.weight[:z] *= scale[:, None, None, None, None]
    vae.conv1.bias[:z] = (vae.conv1.bias[:z] - found_mean) * scale
    vae.conv1.weight[z:], vae.conv1.bias[z:] = 0, 2 * math.log(NOISE / 2)
    vae.conv2.bias += vae.conv2.weight[..., 0, 0, 0] @ ((found_mean - statistics.mean.flatten()) * trained_scale)
    vae.conv2.weight *= (trained_scale / scale)[:, None, None, None]
    save_file({name: p.to(recipe.dtype).contiguous() for name, p in vae.state_dict().items()}, path)
    vae.load_state_dict(load_file(path))  # what is reported is what the file gives
    results = []
    for noise in (0.0, NOISE):
        errors = []
        for part in new.split(4):
            latents = vae.encode(part)
            video = vae.decode(latents + noise * torch.randn_like(latents)).clamp(-1, 1)
            errors.append((video - part).square().mean((1, 3, 4)))  # (S, T)
        errors = torch.cat(errors)
        clip, first, second = (10 * torch.log10(4 / e).mean() for e in (errors.mean(1), errors[:, 0], errors[:, 1]))
        results.append(f"PSNR {clip:.1f} dB with noise {noise} (frame 0 {first:.1f}, frame 1 {second:.1f})")
    return ", ".join(results)


def main() -> None:
    parts = ("tokenizer", "text", *VAES, "clip")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ASSETS, help="folder for the files")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="which of them to make")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the order of sums, and with it the weights, would depend on the number of cores
    args.out.mkdir(parents=True, exist_ok=True)
    if "tokenizer" in args.parts:
        make_tokenizer(args.out / "tokenizer.model")
    if "text" in args.parts:
        tokenizer = Tokenizer(args.out / "tokenizer.model", TEXT_LEN)
        train_text_encoder(args.out / "text_encoder.safetensors", tokenizer)
    for part, recipe in VAES.items():
        if part in args.parts:
            for number in range(len(recipe.rounds)):
                train_vae(args.out / f"{part}.safetensors", recipe, number)
    if "clip" in args.parts:
        make_image_encoder(args.out / "clip.safetensors")


if __name__ == "__main__":
    main()
