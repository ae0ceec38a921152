"""The samples as latents and text states: made of the files once, kept on disk, read by all ranks.

Letters: C F H W latent channels, frames, height and width, L text tokens.
"""

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
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

CACHE_VERSION = 3  # to be raised when what is made of a file changes, so that old caches are not taken for new ones


def fingerprint(module: torch.nn.Module) -> str:
    return digest_of(module.state_dict())


def digest_of(tensors: dict[str, Tensor]) -> str:
    """A hash over the names, types, shapes and bytes of tensors: 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
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
    whole, and carry a hash of their content; so jobs may fill and read one folder at once, and be killed, and all that
    is lost is work.

        found              the items' probes, and the hashes of their files: see survey.Survey
        vae                encode(video) -> (C, F, H, W), .config, .spatial, .temporal
        encode_text        prompts -> as many (L, text_dim), one by one: in batches, the rounding of a text would depend
                           on which others the cache lacked. Gets captions that the cache lacks
        text_fingerprint   of the text encoder's weights and precision, and the tokenizer
        cache_dir          one folder for all ranks; "off": no files. Samples are then encoded whenever they are asked
                           for, text states stay in memory; to the bit the same
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
        self.off = str(cache_dir) == "off"
        self.texts: dict[Path, Tensor] = {}  # by the files they would be in, where there is no cache
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
        agree: Callable[[Callable], object] = lambda function: function(),
        memory: Memory = WHOLE,
    ) -> None:
        """Encodes what the cache lacks or has damaged, each entry on one of `world` ranks: the texts first, then the
        clips. Rank 0 says how many there were.

        `barrier` waits for all ranks, `agree(f)` gives all of them what f() is on rank 0, `memory` brings modules to
        the device. Raises RuntimeError, naming the file, where encoding or writing fails. That strikes one rank alone:
        the caller has to stop the others.
        """
        texts, samples = self.text_entries(), self.sample_entries()
        if self.off:
            states = self.encode_text([caption for _, caption in texts.values()])
            self.texts = dict(zip(texts, (x.cpu() for x in states), strict=True))
            return
        discard_damaged(sorted([*texts, *samples])[rank::world])
        barrier()
        if rank == 0:
            discard_orphans(self.cache_dir)
        # Rank 0 looks for all, since another job may be writing here too; at worst, a file is then made twice.
        lacking = agree(lambda: [[file for file in entries if not file.exists()] for entries in (texts, samples)])
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
        if rank == 0:
            count, encoded = len(texts) + len(samples), sum(map(len, lacking))
            print(f"cache: {count - encoded} of {count} found, {encoded} encoded", flush=True)

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
        if self.off:
            with torch.no_grad():
                tensors = stored(self.make_sample(index, variant))
        else:
            tensors = read_tensors(self.sample_files[index][variant])
        if "condition" in tensors:
            tensors["condition"] = with_mask(tensors["condition"], self.conditioned)
        return tensors

    def text(self, index: int) -> Tensor:
        """(L, text_dim) float32, cut to the caption's own length."""
        return self.read_text(self.text_files[index])

    @property
    def empty_text(self) -> Tensor:
        """(L, text_dim) float32 of the empty prompt: what a dropped caption becomes and what sampling guides with."""
        return self.read_text(self.empty_text_file)

    def read_text(self, file: Path) -> Tensor:
        return self.texts[file] if self.off else read_tensors(file)["text"]


def stored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What becomes of tensors in the cache."""
    return {name: x.detach().to("cpu", torch.float32).contiguous() for name, x in tensors.items()}


def write_entry(path: Path, source: str, make: Callable[..., dict[str, Tensor]], *args) -> None:
    try:
        write_tensors(path, make(*args))
    except Exception as error:
        raise RuntimeError(f"encoding {source} into {path} failed: {error}") from error


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes under a name of its own and renames: a killed run leaves no half file under a name that is read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    tensors = stored(tensors)
    try:
        save_file(tensors, temporary, {"digest": digest_of(tensors)})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """RuntimeError where an entry cannot be read or is not what was written."""
    try:
        with safe_open(path, "pt") as file:
            tensors, written = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    except Exception as error:
        raise RuntimeError(f"{path} cannot be read ({error}); the next start makes it anew") from error
    if written != {"digest": digest_of(tensors)}:
        raise RuntimeError(f"{path} is damaged: its content is not what was written; the next start makes it anew")
    return tensors


def discard_damaged(files: Sequence[Path], threads: int = 8) -> None:
    """Reads those that exist, and removes, with a line for each, those that are not what was written."""

    def discard(file):
        try:
            read_tensors(file)
        except RuntimeError as error:
            file.unlink(missing_ok=True)
            print(error, flush=True)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(discard, [file for file in files if file.exists()]))


def discard_orphans(cache_dir: Path, seconds: float = 24 * 3600) -> None:
    """Removes unfinished files that nobody is writing any more, by their age."""
    for file in cache_dir.rglob("*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # another job has been quicker
            if time.time() - file.stat().st_mtime > seconds:
                file.unlink()
