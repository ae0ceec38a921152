"""From files to the samples of a step: manifests, the endless position stream, packs, and the cache of latents.

Letters: B samples of a step over the whole job, C F H W latent channels, frames, height and width, L text tokens.

A sample is named by its position p in one endless stream, and all that is random about it follows from (seed, p,
purpose). Nothing here keeps a state or knows of other processes, so a resumed run needs the step number and no more,
and every rank that needs a number computes the same one.
"""

import csv
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from text_encoder import clean_prompt
from video import ClipSpec, DataError, Item, Probe, load_clip, probe_all

VIDEO_ENDINGS = (".mp4", ".mov", ".m4v", ".mkv", ".webm", ".avi")
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
ENDINGS = " ".join(VIDEO_ENDINGS + IMAGE_ENDINGS)
PATH_COLUMNS = ("file_path", "video", "image")  # those whose name says the kind need no `type`
CAPTION_COLUMNS = ("text", "prompt")
OTHER_COLUMNS = ("type", "width", "height")  # sizes are read from the files; other tools want them in the manifest
CACHE_VERSION = 1  # to be raised when the pixels made of a file change, so that old caches are not taken for new ones


# ---- Manifests


def read_items(path: Path | str) -> list[Item]:
    """The captioned files of a folder (NAME.mp4 beside NAME.txt, subfolders too) or a .json, .jsonl or .csv manifest.

    A manifest row has a path (`file_path`, `video` or `image`; absolute or relative to the manifest), a caption (`text`
    or `prompt`) and, optionally, `type`, `width` and `height`. Raises DataError naming the row for anything else.
    """
    path = Path(path).expanduser()
    readers = {".json": json_rows, ".jsonl": jsonl_rows, ".csv": csv_rows}
    if path.is_dir():
        items = folder_items(path)
    elif not path.is_file():
        raise DataError(f"{path}: no such file or folder")
    elif path.suffix.lower() not in readers:
        raise DataError(f"{path}: neither a folder nor a .json, .jsonl or .csv manifest")
    else:
        rows = readers[path.suffix.lower()](path)
        items = [row_item(path, f"{path}, {where}", row) for where, row in rows]
    if not items:
        raise DataError(f"{path}: holds no files with the endings {ENDINGS}")
    return items


def folder_items(folder: Path) -> list[Item]:
    """Every video and image below the folder, hidden ones aside, in the order of their names."""
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    names = [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
    captions = {name[:-4]: folder / name for name in names if name.lower().endswith(".txt")}
    items = []
    for name in names:
        file = folder / name
        if kind := kind_of(file):
            caption = captions.get(name.removesuffix(file.suffix))
            if caption is None:
                manifests = [name for name in names if name.endswith((".json", ".jsonl", ".csv"))]
                hint = f"; or give the manifest {folder / manifests[0]} as --data" if manifests else ""
                raise DataError(f"{file}: needs its caption in {file.with_suffix('.txt').name} beside it{hint}")
            items.append(Item(file, caption_text(str(caption), read_text(caption)), kind))
        elif name.removesuffix(file.suffix) in captions and file.suffix.lower() != ".txt":
            raise DataError(f"{file}: has a caption, but {file.suffix or 'its ending'} is none of {ENDINGS}")
    return items


def json_rows(path: Path) -> list[tuple[str, object]]:
    rows = parse_json(str(path), read_text(path))
    if not isinstance(rows, list):
        raise DataError(f"{path}: is not a list of rows, [{{...}}, ...]")
    return [(f"row {i}", row) for i, row in enumerate(rows, 1)]


def jsonl_rows(path: Path) -> list[tuple[str, object]]:
    lines = enumerate(read_text(path).split("\n"), 1)  # not splitlines(): it also splits at U+2028 inside a caption
    return [(f"line {i}", parse_json(f"{path}, line {i}", line)) for i, line in lines if line.strip()]


def csv_rows(path: Path) -> list[tuple[str, object]]:
    """Rows of a CSV. Every cell is text: a caption "NA", "null" or "123" stays what it is."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            reader = csv.DictReader(file, restkey="(beyond the last column)", strict=True)
            return [(f"row {i}", row) for i, row in enumerate(reader, 1)]
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path}: not a UTF-8 CSV file: {error}") from error


def row_item(manifest: Path, where: str, row: object) -> Item:
    """The item of one manifest row."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: is not an object {{...}}")
    known = PATH_COLUMNS + CAPTION_COLUMNS + OTHER_COLUMNS
    if unknown := [name for name in row if name not in known]:
        raise DataError(f"{where}: unknown column {unknown[0]!r}; known are {', '.join(known)}")
    row = {name: value for name, value in row.items() if value is not None and value != ""}
    paths = [name for name in PATH_COLUMNS if name in row]
    captions = [name for name in CAPTION_COLUMNS if name in row]
    if len(paths) != 1 or not isinstance(row[paths[0]], str):
        raise DataError(f"{where}: needs one path, as text, in one of {', '.join(PATH_COLUMNS)}")
    if len(captions) != 1:
        raise DataError(f"{where}: needs one caption in one of {', '.join(CAPTION_COLUMNS)}")
    file = manifest.parent / Path(row[paths[0]]).expanduser()  # an absolute path wins over the folder
    if not file.is_file():
        raise DataError(f"{where}: no such file: {file}")
    kind = kind_of(file)
    if kind is None:
        raise DataError(f"{where}: {file.name} is none of {ENDINGS}")
    if "type" in row and row["type"] != kind:
        raise DataError(f"{where}: type is {row['type']!r}, but by its ending {file.name} is {kind}")
    return Item(file, caption_text(where, row[captions[0]]), kind)


def kind_of(file: Path) -> str | None:
    ending = file.suffix.lower()
    return "video" if ending in VIDEO_ENDINGS else "image" if ending in IMAGE_ENDINGS else None


def caption_text(where: str, caption: object) -> str:
    if not isinstance(caption, str):
        raise DataError(f"{where}: the caption is {caption!r} and not text")
    if not caption.strip():
        raise DataError(f"{where}: the caption is empty; to train without captions use --caption-dropout")
    return caption.strip()


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # with or without a byte order mark, whatever the locale
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error}") from error


def parse_json(where: str, text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error}") from error


# ---- The position stream


@dataclass(frozen=True)
class Draw:
    """What the sample at one position of the stream is made of."""

    position: int
    index: int  # of the item
    variant: int  # which of the item's clips
    dropped: bool  # whether the empty prompt stands in for its caption
    uniform: float  # in [0, 1), of which the training sigma is made


def generator(seed: int, position: int, purpose: str) -> torch.Generator:
    """The random numbers of one position for one purpose, alike on every rank. On the CPU, since CUDA's generators
    differ between devices; it keeps 32 bits of a seed, so of 100000 positions some two, far apart, may share noise."""
    digest = hashlib.blake2b(f"{seed}/{position}/{purpose}".encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, n: int) -> Tensor:
    return torch.randperm(n, generator=generator(seed, epoch, "permutation"))


def sample_index(seed: int, position: int, n: int) -> int:
    """Which of n samples stands at a position: each once per epoch, in an order of the epoch's own, and no position
    is skipped where an epoch ends within a batch."""
    return int(permutation(seed, position // n, n)[position % n])


def stratified_uniforms(seed: int, step: int, batch_size: int) -> Tensor:
    """(B,) float64 in [0, 1), one in each stratum of width 1/B: the timesteps of a step then cover the whole schedule,
    which takes most of the noise out of the loss. Each on its own is uniform, so expectations stay."""
    strata = torch.randperm(batch_size, generator=generator(seed, step, "strata"))
    within = [
        torch.rand((), generator=generator(seed, position, "uniform"), dtype=torch.float64)
        for position in range(step * batch_size, (step + 1) * batch_size)
    ]
    uniforms = (strata + torch.stack(within)) / batch_size
    return uniforms.clamp(max=1 - 2**-53)  # the last stratum's top may round to 1


def draws(step: int, batch_size: int, seed: int, dataset, caption_dropout: float = 0.0) -> list[Draw]:
    """The B draws of a step: positions step B ... step B + B - 1. `dataset` has len() and variants(index)."""
    uniforms = stratified_uniforms(seed, step, batch_size).tolist()
    result = []
    for position, uniform in enumerate(uniforms, step * batch_size):
        index = sample_index(seed, position, len(dataset))
        variant = torch.randint(dataset.variants(index), (), generator=generator(seed, position, "variant"))
        chance = torch.rand((), generator=generator(seed, position, "dropout"), dtype=torch.float64)
        result.append(Draw(position, index, int(variant), bool(chance < caption_dropout), uniform))
    return result


# ---- Packs


def sample_cost(tokens: int, dim: int, ffn_dim: int, text_len: int = 512) -> float:
    """Floating point operations of one DiT block's forward on a sample; the other costs of a step are in proportion.

    Linear layers take 2 x inputs x outputs per token: q, k, v, o of self-attention, q, o of cross-attention, and the
    two of the feed-forward; k, v of cross-attention run over the text. Attention takes 4 x width x queries x keys.
    """
    linear = 2 * tokens * (6 * dim**2 + 2 * dim * ffn_dim) + 2 * text_len * 2 * dim**2
    return float(linear + 4 * dim * tokens * (tokens + text_len))


def assign_packs(tokens: Sequence[int], costs: Sequence[float], ranks: int, pack_tokens: int) -> list[list[list[int]]]:
    """Which rank computes which samples of a step, and in which packs: result[rank][pack] is a list of sample numbers.

    Samples go, costliest first, to the rank with the least cost so far, which leaves the ranks within one sample's
    cost of each other. A rank's samples then fill packs of at most `pack_tokens` (0: one pack), longest first, each
    into the first pack with room. All ranks get as many packs as the one with most, the rest being empty, since a
    pack's collectives need every rank. Raises ValueError for a sample that fits no pack.
    """
    if pack_tokens and max(tokens) > pack_tokens:
        raise ValueError(
            f"a sample of {max(tokens)} tokens does not fit --pack-tokens {pack_tokens}; "
            f"use --pack-tokens {max(tokens)} or more, or smaller clips (--frames, --height, --width, --max-area)"
        )
    shares, loads = [[] for _ in range(ranks)], [0.0] * ranks
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(ranks), key=lambda r: (loads[r], len(shares[r]), r))
        shares[rank].append(i)
        loads[rank] += costs[i]
    result = [first_fit(tokens, share, pack_tokens) for share in shares]
    most = max(len(packs) for packs in result)
    return [packs + [[] for _ in range(most - len(packs))] for packs in result]


def first_fit(tokens: Sequence[int], share: Sequence[int], pack_tokens: int) -> list[list[int]]:
    """The samples of one rank in packs, by first fit with the longest first."""
    if not pack_tokens:
        return [sorted(share)] if share else []
    packs, room = [], []
    for i in sorted(share, key=lambda i: (-tokens[i], i)):
        fitting = [pack for pack in range(len(packs)) if room[pack] >= tokens[i]]
        if not fitting:
            packs.append([])
            room.append(pack_tokens)
        pack = fitting[0] if fitting else len(packs) - 1
        packs[pack].append(i)
        room[pack] -= tokens[i]
    return [sorted(pack) for pack in packs]


# ---- The cache of latents and text states


def fingerprint(module: torch.nn.Module) -> str:
    """A hash over the names, types, shapes and bytes of a module's state dict: 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(module.state_dict().items()):
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
    return probe_all(items, spec, progress=True), digests([item.path for item in items])


def cache_key(**parts) -> str:
    """A name for what is made of `parts`: another name as soon as any of them differs."""
    text = json.dumps({"version": CACHE_VERSION, **parts}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def latent_key(digest: str, vae: str, found: Probe, spec: ClipSpec, variant: int) -> str:
    """The key of one clip's latents. Rates matter to videos only, and of the clip's neighbours nothing does."""
    rate = None if found.source_fps is None else str(spec.fps)
    size = [found.length, found.clip_height, found.clip_width]
    return cache_key(kind="latents", file=digest, vae=vae, size=size, fps=rate, start=found.starts[variant])


def text_key(caption: str, encoder: str) -> str:
    return cache_key(kind="text", text=clean_prompt(caption), encoder=encoder)


class LatentDataset:
    """The items as latents and text states, from an on-disk cache that is filled first.

    Each cache file is named by a hash of all that it was made of (file contents, weights, size, frames, rate, window;
    cleaned caption), so nothing stale is ever read. Files are written under another name and renamed when whole.

        found              survey(items, spec), which may have been made on another rank
        vae                encode(video) -> (C, F, H, W), .config, .spatial, .temporal
        encode_text        list of prompts -> list of (L, text_dim); called only for captions that the cache lacks
        text_fingerprint   of the text encoder's weights and the tokenizer
        cache_dir          one folder for all ranks
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
    ):
        self.items, self.spec, self.vae, self.encode_text = list(items), spec, vae, encode_text
        self.cache_dir = Path(cache_dir).expanduser()
        self.probes, contents = found
        vae_key = f"{fingerprint(vae)} {vae.config}"
        self.latent_files = [
            [self.file("latents", latent_key(digest, vae_key, found, spec, i)) for i in range(len(found.starts))]
            for digest, found in zip(contents, self.probes, strict=True)
        ]
        self.text_files = [self.file("text", text_key(item.caption, text_fingerprint)) for item in self.items]
        self.empty_text_file = self.file("text", text_key("", text_fingerprint))

    def file(self, kind: str, key: str) -> Path:
        return self.cache_dir / kind / f"{key}.safetensors"

    def entries(self) -> dict[Path, tuple[str, Callable[[], Tensor]]]:
        """Every cache file with the name of what it is made of and a function that makes it; equal ones once."""
        entries = {self.empty_text_file: ("the empty prompt", lambda: self.make_text(""))}
        for i, item in enumerate(self.items):
            source = f"the caption of {item.path}"
            entries.setdefault(self.text_files[i], (source, lambda item=item: self.make_text(item.caption)))
            for variant, file in enumerate(self.latent_files[i]):
                make = lambda i=i, variant=variant: self.make_latents(i, variant)  # noqa: E731
                entries.setdefault(file, (str(item.path), make))
        return entries

    def make_text(self, caption: str) -> Tensor:
        """One prompt at a time: encoded in batches, its rounding would depend on which others the cache lacked."""
        return self.encode_text([clean_prompt(caption)])[0]

    def make_latents(self, index: int, variant: int) -> Tensor:
        clip = load_clip(self.items[index], self.probes[index], self.spec, variant)  # (3, T, H, W)
        parameter = next(self.vae.parameters())
        return self.vae.encode(clip.to(parameter.device, parameter.dtype))

    @torch.no_grad()
    def fill(self, rank: int = 0, world: int = 1, barrier: Callable[[], None] = lambda: None) -> None:
        """Encodes what the cache lacks, each entry on one of `world` ranks; `barrier` waits for all of them.

        Raises RuntimeError, naming the file, where encoding or writing fails. That strikes one rank alone: the caller
        has to stop the others.
        """
        entries = self.entries()
        missing = [file for file in entries if not file.exists()]
        barrier()  # nobody writes before everybody has looked; ranks would divide different lists otherwise
        for file in tqdm(missing[rank::world], "encoding", disable=rank != 0 or not missing):
            source, make = entries[file]
            try:
                write_tensor(file, make())
            except Exception as error:
                raise RuntimeError(f"encoding {source} into {file} failed: {error}") from error
        barrier()
        if lost := [file for file in missing if not file.exists()]:
            raise RuntimeError(
                f"{len(lost)} cache files were not written, {lost[0]} among them: --cache must be one folder that "
                "all ranks share"
            )

    def __len__(self) -> int:
        return len(self.items)

    def variants(self, index: int) -> int:
        return len(self.probes[index].starts)

    def shape(self, index: int) -> tuple[int, int, int, int]:
        """(C, F, H, W) of an item's latents, without reading them."""
        found, vae = self.probes[index], self.vae
        F = 1 + (found.length - 1) // vae.temporal
        return vae.config.z_dim, F, found.clip_height // vae.spatial, found.clip_width // vae.spatial

    def latents(self, index: int, variant: int) -> Tensor:
        """(C, F, H, W) float32."""
        return read_tensor(self.latent_files[index][variant])

    def text(self, index: int) -> Tensor:
        """(L, text_dim) float32, cut to the caption's own length."""
        return read_tensor(self.text_files[index])

    @property
    def empty_text(self) -> Tensor:
        """(L, text_dim) float32 of the empty prompt: what a dropped caption becomes and what sampling guides with."""
        return read_tensor(self.empty_text_file)


def write_tensor(path: Path, tensor: Tensor) -> None:
    """Writes under a name of its own and renames: a killed run leaves no half file under a name that is read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        save_file({"x": tensor.detach().to("cpu", torch.float32).contiguous()}, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_tensor(path: Path) -> Tensor:
    try:
        return load_file(path)["x"]
    except Exception as error:
        raise RuntimeError(f"{path} cannot be read ({error}); delete it and it is made anew") from error
