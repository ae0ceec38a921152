"""The samples as latents and text states: made of the files once, kept on disk, read by all ranks.

Letters: C F H W latent channels, frames, height and width, L text tokens.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

import decode
from clips import ClipSpec, Probe, Variant, load_clip, load_picture
from condition import padded, with_mask
from manifests import Item
from memory import WHOLE, Memory
from stream import Mixture
from text_encoder import clean_prompt
from workers import Decoders

CACHE_VERSION = 3  # to be raised when the pixels made of a file change, so that old caches are not taken for new ones


def fingerprint(module: torch.nn.Module) -> str:
    """A hash over the names, types, shapes and bytes of a module's state dict: 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def digests(files: Sequence[Path], threads: int = 8) -> list[str]:
    """A hash of each file's content: 32 hexadecimal digits."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(decode.file_digest, files))


def cache_key(**parts) -> str:
    """A name for what is made of `parts`: another name as soon as any of them differs."""
    text = json.dumps({"version": CACHE_VERSION, **parts}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def sample_key(digest: str, encoders: str, found: Probe, spec: ClipSpec, clip: Variant) -> str:
    """The key of one clip. Rates matter to videos only, and of the clip's neighbours nothing does."""
    rate = str(spec.fps) if found.timeline else None
    size = [clip.length, clip.height, clip.width]
    return cache_key(kind="sample", file=digest, encoders=encoders, size=size, fps=rate, start=clip.start)


def text_key(caption: str, encoder: str) -> str:
    return cache_key(kind="text", text=clean_prompt(caption), encoder=encoder)


class LatentDataset:
    """The items as latents and text states, from an on-disk cache that is filled first.

    Each cache file is named by a hash of all that it was made of (file contents, weights, size, frames, rate, window,
    condition; cleaned caption), so nothing stale is ever read. Files are written under another name and renamed when
    whole.

        found              the items' probes, and the hashes of their files: see data.survey
        vae                encode(video) -> (C, F, H, W), .config, .spatial, .temporal
        encode_text        prompts -> as many (L, text_dim), one by one: in batches, the rounding of a text would depend
                           on which others the cache lacked. Gets captions that the cache lacks
        text_fingerprint   of the text encoder's weights and the tokenizer
        cache_dir          one folder for all ranks
        condition          what the model is given of a clip, see presets.py
        image_encoder      the CLIP tower whose features it is given as well, or None
        mixture            how the stream draws the items; default: each once per epoch
    """

    def __init__(
        self,
        items: Sequence[Item],
        spec: ClipSpec,
        found: tuple[list[Probe], list[str]],
        vae,
        encode_text: Callable[[list[str]], Iterable[Tensor]],
        text_fingerprint: str,
        cache_dir: Path | str,
        condition: str = "",
        image_encoder=None,
        mixture: Mixture | None = None,
    ):
        self.items, self.spec, self.vae, self.encode_text = list(items), spec, vae, encode_text
        self.conditioned, self.image_encoder = condition, image_encoder
        self.cache_dir = Path(cache_dir).expanduser()
        self.mixture = mixture or Mixture((len(self.items),))
        self.probes, contents = found
        encoders = f"{fingerprint(vae)} {vae.config} {vae.extra_repr()} {condition}"  # in tiles it encodes otherwise
        if image_encoder is not None:
            encoders += f" {fingerprint(image_encoder)} {image_encoder.config}"
        self.sample_files = [
            [self.file("samples", sample_key(digest, encoders, found, spec, clip)) for clip in found.variants]
            for digest, found in zip(contents, self.probes, strict=True)
        ]
        self.text_files = [self.file("text", text_key(item.caption, text_fingerprint)) for item in self.items]
        self.empty_text_file = self.file("text", text_key("", text_fingerprint))

    def file(self, kind: str, key: str) -> Path:
        return self.cache_dir / kind / f"{key}.safetensors"

    def text_entries(self) -> dict[Path, tuple[str, str]]:
        """{file: (the name of what it is made of, the cleaned caption)}, equal captions once."""
        entries = {self.empty_text_file: ("the empty prompt", "")}
        for file, item in zip(self.text_files, self.items, strict=True):
            entries.setdefault(file, (f"the caption of {item.path}", clean_prompt(item.caption)))
        return entries

    def sample_entries(self) -> dict[Path, tuple[int, int]]:
        """{file: (index, variant)}, equal clips once."""
        entries = {}
        for i, files in enumerate(self.sample_files):
            for variant, file in enumerate(files):
                entries.setdefault(file, (i, variant))
        return entries

    def make_sample(self, index: int, variant: int, reader=decode) -> dict[str, Tensor]:
        """The tensors of one clip: "latents"; for some models "condition", the latents of its first (and last) frame
        and grey between, and "image", the CLIP features of these frames."""
        item = self.items[index]
        parameter = next(self.vae.parameters())
        clip = load_clip(item, self.probes[index], self.spec, variant, reader).to(parameter.device, parameter.dtype)
        first, last = (  # (3, 1, H, W) each
            frame if path is None else load_picture(path, frame.shape[2:], reader).to(frame)
            for path, frame in ((item.first_frame, clip[:, :1]), (item.last_frame, clip[:, -1:]))
        )
        last = last if self.conditioned == "first-last" else None
        tensors = {"latents": self.vae.encode(clip)}
        if self.conditioned == "first-latent" and item.first_frame is not None:
            tensors["latents"][:, :1] = self.vae.encode(first)  # the VAE is causal: frame 0 alone gives latent frame 0
        if self.conditioned in ("first", "first-last"):
            tensors["condition"] = self.vae.encode(padded(first, clip.shape[1], last))
        if self.image_encoder is not None:
            pictures = [first] if last is None else [first, last]
            tensors["image"] = self.image_encoder.encode(pictures)  # (1 or 2, 257, clip_dim)
        return tensors

    @torch.no_grad()
    def fill(
        self,
        rank: int = 0,
        world: int = 1,
        barrier: Callable[[], None] = lambda: None,
        memory: Memory = WHOLE,
    ) -> None:
        """Encodes what the cache lacks, each entry on one of `world` ranks: the texts first, then the clips.

        `barrier` waits for all ranks, `memory` brings modules to the device. Raises RuntimeError, naming the file,
        where encoding or writing fails. That strikes one rank alone: the caller has to stop the others.
        """
        texts, samples = self.text_entries(), self.sample_entries()
        lacking = [[file for file in entries if not file.exists()] for entries in (texts, samples)]
        barrier()  # nobody writes before everybody has looked; ranks would divide different lists otherwise
        mine, clips = (files[rank::world] for files in lacking)
        # The ranks may hold the encoder's weights together. So all encode equally many texts, the last one perhaps the
        # empty prompt, for nothing but the company.
        rounds = -(-len(lacking[0]) // world)
        states = iter(self.encode_text([texts[file][1] for file in mine] + [""] * (rounds - len(mine))))
        for file in tqdm(mine, "encoding captions", disable=rank != 0 or not mine):
            write_entry(file, texts[file][0], lambda: {"text": next(states)})
        for _ in states:
            pass
        encoders = (module for module in (self.vae, self.image_encoder) if module is not None)
        with memory.using(*encoders), Decoders(1, threads=4) as decoders:
            for file in tqdm(clips, "encoding clips", disable=rank != 0 or not clips):
                i, variant = samples[file]
                write_entry(file, str(self.items[i].path), self.make_sample, i, variant, decoders)
        barrier()
        if lost := [file for files in lacking for file in files if not file.exists()]:
            raise RuntimeError(
                f"{len(lost)} cache files were not written, {lost[0]} among them: --cache must be one folder that "
                "all ranks share"
            )

    def __len__(self) -> int:
        return len(self.items)

    def variants(self, index: int) -> int:
        return len(self.probes[index].variants)

    def shape(self, index: int, variant: int) -> tuple[int, int, int, int]:
        """(C, F, H, W) of an item's latents, without reading them."""
        clip, vae = self.probes[index].variants[variant], self.vae
        F = 1 + (clip.length - 1) // vae.temporal
        return vae.config.z_dim, F, clip.height // vae.spatial, clip.width // vae.spatial

    def sample(self, index: int, variant: int) -> dict[str, Tensor]:
        """float32: "latents" (C, F, H, W), and as the model wants it "condition" (20, F, H, W), which is the mask and
        the latents of what is given, and "image" (1 or 2, 257, clip_dim)."""
        tensors = read_tensors(self.sample_files[index][variant])
        if "condition" in tensors:
            tensors["condition"] = with_mask(tensors["condition"], self.conditioned)
        return tensors

    def text(self, index: int) -> Tensor:
        """(L, text_dim) float32, cut to the caption's own length."""
        return read_tensors(self.text_files[index])["text"]

    @property
    def empty_text(self) -> Tensor:
        """(L, text_dim) float32 of the empty prompt: what a dropped caption becomes and what sampling guides with."""
        return read_tensors(self.empty_text_file)["text"]


def write_entry(path: Path, source: str, make: Callable[..., dict[str, Tensor]], *args) -> None:
    try:
        write_tensors(path, make(*args))
    except Exception as error:
        raise RuntimeError(f"encoding {source} into {path} failed: {error}") from error


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes under a name of its own and renames: a killed run leaves no half file under a name that is read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        save_file({k: x.detach().to("cpu", torch.float32).contiguous() for k, x in tensors.items()}, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except Exception as error:
        raise RuntimeError(f"{path} cannot be read ({error}); delete it and it is made anew") from error
