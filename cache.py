"""The samples as latents and text states: made of the files once, kept on disk, read by all ranks.

Letters: C F H W latent channels, frames, height and width, L text tokens.
"""

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from clips import ClipSpec, Probe, load_clip, load_picture, probe_all
from condition import padded, with_mask
from manifests import Item
from text_encoder import clean_prompt

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

    def digest(path):
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(digest, files))


def survey(items: Sequence[Item], spec: ClipSpec) -> tuple[list[Probe], list[str]]:
    """Opens every file once: what it holds, and a hash of it. DataError names all that cannot be used."""
    files = [[path for path in (item.path, item.first_frame, item.last_frame) if path is not None] for item in items]
    found = iter(digests([path for paths in files for path in paths]))
    contents = ["/".join(next(found) for _ in paths) for paths in files]
    return probe_all(items, spec, progress=True), contents


def cache_key(**parts) -> str:
    """A name for what is made of `parts`: another name as soon as any of them differs."""
    text = json.dumps({"version": CACHE_VERSION, **parts}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def sample_key(digest: str, encoders: str, found: Probe, spec: ClipSpec, variant: int) -> str:
    """The key of one clip. Rates matter to videos only, and of the clip's neighbours nothing does."""
    rate = None if found.source_fps is None else str(spec.fps)
    size = [found.length, found.clip_height, found.clip_width]
    return cache_key(kind="sample", file=digest, encoders=encoders, size=size, fps=rate, start=found.starts[variant])


def text_key(caption: str, encoder: str) -> str:
    return cache_key(kind="text", text=clean_prompt(caption), encoder=encoder)


class LatentDataset:
    """The items as latents and text states, from an on-disk cache that is filled first.

    Each cache file is named by a hash of all that it was made of (file contents, weights, size, frames, rate, window,
    condition; cleaned caption), so nothing stale is ever read. Files are written under another name and renamed when
    whole, and carry a hash of their content; so jobs may fill and read one folder at once, and be killed, and all that
    is lost is work.

        found              survey(items, spec), which may have been made on another rank
        vae                encode(video) -> (C, F, H, W), .config, .spatial, .temporal
        encode_text        list of prompts -> list of (L, text_dim); called only for captions that the cache lacks
        text_fingerprint   of the text encoder's weights and the tokenizer
        cache_dir          one folder for all ranks; "off": no files. Samples are then encoded whenever they are asked
                           for, text states stay in memory; to the bit the same
        condition          what the model is given of a clip, see presets.py
        image_encoder      the CLIP tower whose features it is given as well, or None
    """

    def __init__(
        self,
        items: Sequence[Item],
        spec: ClipSpec,
        found: tuple[list[Probe], list[str]],
        vae,
        encode_text: Callable[[list[str]], list[Tensor]],
        text_fingerprint: str,
        cache_dir: Path | str,
        condition: str = "",
        image_encoder=None,
    ):
        self.items, self.spec, self.vae, self.encode_text = list(items), spec, vae, encode_text
        self.conditioned, self.image_encoder = condition, image_encoder
        self.cache_dir = Path(cache_dir).expanduser()
        self.off = str(cache_dir) == "off"
        self.texts: dict[Path, Tensor] = {}  # by the files they would be in, where there is no cache
        self.probes, contents = found
        encoders = f"{fingerprint(vae)} {vae.config} {condition}"
        if image_encoder is not None:
            encoders += f" {fingerprint(image_encoder)} {image_encoder.config}"
        self.sample_files = [
            [self.file("samples", sample_key(digest, encoders, found, spec, i)) for i in range(len(found.starts))]
            for digest, found in zip(contents, self.probes, strict=True)
        ]
        self.text_files = [self.file("text", text_key(item.caption, text_fingerprint)) for item in self.items]
        self.empty_text_file = self.file("text", text_key("", text_fingerprint))

    def file(self, kind: str, key: str) -> Path:
        return self.cache_dir / kind / f"{key}.safetensors"

    def entries(self) -> dict[Path, tuple[str, Callable[[], dict[str, Tensor]]]]:
        """Every cache file with the name of what it is made of and a function that makes it; equal ones once."""
        entries = {self.empty_text_file: ("the empty prompt", lambda: self.make_text(""))}
        for i, item in enumerate(self.items):
            source = f"the caption of {item.path}"
            entries.setdefault(self.text_files[i], (source, lambda item=item: self.make_text(item.caption)))
            for variant, file in enumerate(self.sample_files[i]):
                make = lambda i=i, variant=variant: self.make_sample(i, variant)  # noqa: E731
                entries.setdefault(file, (str(item.path), make))
        return entries

    def make_text(self, caption: str) -> dict[str, Tensor]:
        """One prompt at a time: encoded in batches, its rounding would depend on which others the cache lacked."""
        return {"text": self.encode_text([clean_prompt(caption)])[0]}

    def make_sample(self, index: int, variant: int) -> dict[str, Tensor]:
        """The tensors of one clip: "latents"; for some models "condition", the latents of its first (and last) frame
        and grey between, and "image", the CLIP features of these frames."""
        item = self.items[index]
        parameter = next(self.vae.parameters())
        clip = load_clip(item, self.probes[index], self.spec, variant).to(parameter.device, parameter.dtype)
        first, last = (  # (3, 1, H, W) each
            frame if path is None else load_picture(path, frame.shape[2:]).to(frame)
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
    def fill(self, rank: int = 0, world: int = 1, barrier: Callable[[], None] = lambda: None) -> None:
        """Encodes what the cache lacks or has damaged, each entry on one of `world` ranks; `barrier` waits for all of
        them. Rank 0 says how many there were.

        Raises RuntimeError, naming the file, where encoding or writing fails. That strikes one rank alone: the caller
        has to stop the others.
        """
        entries = self.entries()
        if self.off:
            texts = [file for file in entries if file.parent.name == "text"]
            self.texts = {file: entries[file][1]()["text"] for file in tqdm(texts, "encoding text", disable=rank != 0)}
            return
        # An entry's rank follows from its name: other jobs write here too, so ranks may not agree on what is missing.
        mine = sorted(entries)[rank::world]
        discard_damaged(mine)
        if rank == 0:
            discard_orphans(self.cache_dir)
        barrier()
        found = sum(file.exists() for file in entries)
        barrier()  # nobody writes before rank 0 has counted
        missing = [file for file in mine if not file.exists()]
        for file in tqdm(missing, "encoding", disable=rank != 0 or not missing):
            source, make = entries[file]
            try:
                write_tensors(file, make())
            except Exception as error:
                raise RuntimeError(f"encoding {source} into {file} failed: {error}") from error
        barrier()
        if lost := [file for file in entries if not file.exists()]:
            raise RuntimeError(
                f"{len(lost)} cache files were not written, {lost[0]} among them: --cache must be one folder that "
                "all ranks share"
            )
        if rank == 0:
            print(f"cache: {found} of {len(entries)} found, {len(entries) - found} encoded", flush=True)

    def __len__(self) -> int:
        return len(self.items)

    def variants(self, index: int) -> int:
        return len(self.probes[index].starts)

    def shape(self, index: int) -> tuple[int, int, int, int]:
        """(C, F, H, W) of an item's latents, without reading them."""
        found, vae = self.probes[index], self.vae
        F = 1 + (found.length - 1) // vae.temporal
        return vae.config.z_dim, F, found.clip_height // vae.spatial, found.clip_width // vae.spatial

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
    for file in cache_dir.glob("*/*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # another job has been quicker
            if time.time() - file.stat().st_mtime > seconds:
                file.unlink()
