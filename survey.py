"""The survey of the data: every file is opened once before training, and whatever is wrong with one is said.

No sample is dropped or replaced without a word: the faulty ones are listed together, and without --allow-drop they are
the end of it. What a file holds and which of its frames have been decoded is kept in CACHE/survey.json, under its path,
size and time of change.
"""

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

from tqdm import tqdm

import clips
import manifests
import stream
from clips import ClipSpec, Probe
from decode import Source, Timeline
from manifests import DataError, Item
from model import CONFIGS
from presets import PRESETS
from vae import VAE_CONFIGS
from workers import Decoders

WORKERS = min(16, os.cpu_count() or 1)  # one decoding process per core, and not hundreds on a large machine
SURVEY_VERSION = "1"  # to be raised when decode.Source changes


@dataclass(frozen=True)
class DataOptions:
    """The options of train.py, `check` and `cache` that say what the samples are."""

    model: str = "demo"  # preset, see CONFIGS in model.py
    data: tuple[str, ...] = ()  # folders or manifests (json, jsonl, csv), each with a weight or none, as in a.json:3
    # b/:1, for draws in that ratio; without weights an epoch is every item once; empty: the demo set, written on first
    # use
    cache: str = "cache"  # folder of encoded latents and text, shared by all ranks; off: nothing is kept, and a clip is
    # encoded whenever it is drawn
    height: int = 0  # pixels; with --width. Files are scaled to cover the size and cut at the centre
    width: int = 0  # pixels
    max_area: int = 0  # instead of height and width: keep each file's aspect, at most so many pixels
    min_area: int = 0  # with --max-area: each draw takes one of --sizes areas between the two
    tokens: int = 0  # instead: keep the aspect, and each draw takes one of --sizes pairs of length and size whose clips
    # have 85 % of so many tokens to all of it; images are one frame as large as fits
    sizes: int = 4  # of each file with --min-area, at most so many with --tokens. Each is encoded and kept
    upscale: bool = False  # enlarge files that --max-area, --min-area or --tokens leave room for
    frames: int = 17  # at most so many frames of a video, 4n + 1; a shorter one gives the largest 4n + 1 that it has
    min_frames: int = 1  # refuse videos with fewer frames, at the model's rate; --tokens makes no shorter clips
    fps: int = 0  # videos are brought to this rate; 0: the model's own, 16 or 24
    clip: Literal["random", "center", "start", "all"] = "random"  # the windows of a video; each draw takes one. random:
    # --clips of them, one in each of as many equal parts of the file, drawn by its name; center, start: that one; all:
    # one every --stride frames, as many as there are
    clips: int = 4  # windows of one video with --clip random. Each is encoded and kept, at each of the sizes
    stride: int = 0  # frames from one window to the next with --clip all; 0: a window's length, so none overlap
    encoding: str = ""  # of captions and manifests without a byte order mark, e.g. cp1252; empty: UTF-8
    allow_drop: bool = False  # go on without the samples that cannot be used, instead of stopping


def settled(config: DataOptions) -> dict[str, int]:
    """What follows from the model where it was not given: the size and the rate that it is sampled at."""
    if config.model not in PRESETS:
        raise ValueError(f"--model {config.model} is none of {', '.join(PRESETS)}")
    how = PRESETS[config.model].sampling
    given = {"fps": config.fps or how.fps}
    if not (config.height or config.width or config.max_area or config.tokens):
        given |= {"height": how.height, "width": how.width}
    return given


def clip_spec(config: DataOptions) -> ClipSpec:
    """The options, settled, as a ClipSpec."""
    wan, vae = CONFIGS[config.model], VAE_CONFIGS[PRESETS[config.model].vae]
    options = {name: value for name, value in vars(config).items() if name in ClipSpec.__dataclass_fields__}
    return ClipSpec(**options, multiple=vae.spatial * wan.patch_size[1])


def check(config: DataOptions) -> None:
    """Refuse, in one line, options that name no data or no clips; settled, before anything is read."""
    for path in stream.split_weights(config.data)[0]:
        if not Path(path).expanduser().exists():
            raise ValueError(f"--data {path}: no such file or folder")
    clip_spec(config)


# ---- The survey


@dataclass(frozen=True)
class Survey:
    """The samples that can be used, in their order, and what was found of each."""

    items: list[Item]
    probes: list[Probe]
    digests: list[str]  # hashes of the files, and of the pictures that stand in for their first and last frames
    mixture: stream.Mixture
    dropped: list[str]  # why each of the others cannot be used; the message names its file or row
    notes: list[str]  # what else its owner should know


def survey(config: DataOptions, folders: Sequence[str]) -> Survey:
    """The samples of the datasets at `folders` (PATH or PATH:WEIGHT). DataError lists the ones that cannot be used, if
    there are any and not config.allow_drop; else they and the notes are printed. For one process of a run."""
    found = examine(config, folders)
    if found.dropped and not config.allow_drop:
        raise DataError(f"{describe_dropped(found)}\nMend or remove them, or add --allow-drop to go on without them")
    if found.dropped:
        print(describe_dropped(found), file=sys.stderr)
    for note in found.notes:
        print(note, file=sys.stderr)
    return found


def describe_dropped(found: Survey) -> str:
    total = len(found.items) + len(found.dropped)
    return "\n  ".join([f"{len(found.dropped)} of {total} samples cannot be used:", *dict.fromkeys(found.dropped)])


def examine(config: DataOptions, folders: Sequence[str]) -> Survey:
    """Opens every file once, in parallel. DataError where a manifest is wrong as a whole or nothing can be used."""
    spec, notes = clip_spec(config), []
    paths, weights = stream.split_weights(folders)
    parts = [manifests.read_items(path, config.encoding, notes) for path in paths]
    items = [item for part in parts for item in part]
    stills = PRESETS[config.model].condition in ("", "first-latent")

    records = Records(None if config.cache == "off" else Path(config.cache).expanduser() / "survey.json")
    try:
        outcomes = look_at(items, spec, records)
    finally:  # also what an interrupted survey has found is found
        records.write()
    fit, dropped, sizes = [], [], []
    for path, part in zip(paths, parts, strict=True):
        earlier = len(dropped)
        for item in part:
            try:
                fit.append((item, *usable(item, outcomes, spec, stills)))
            except DataError as error:
                dropped.append(str(error))
        sizes.append(len(fit) - sum(sizes))
        if not sizes[-1]:
            reasons = dict.fromkeys(dropped[earlier:])
            raise DataError("\n  ".join([f"{path}: none of its samples can be used:", *reasons]))
    for item, _, source, _ in fit:
        notes += [f"{item.path}: {note}" for note in source.notes]
    return Survey(
        [item for item, *_ in fit],
        [probe for _, probe, *_ in fit],
        [digest for *_, digest in fit],
        stream.Mixture(tuple(sizes), weights),
        dropped,
        list(dict.fromkeys(notes)),
    )


def look_at(items: Sequence[Item], spec: ClipSpec, records: "Records") -> dict:
    """{(path, kind): (its Probe, its Source), or the DataError} of all files that sound items name."""
    sound = [item for item in items if not item.fault]
    ends = [end for item in sound for end in (item.first_frame, item.last_frame) if end]
    files = {(item.path, item.kind): item for item in sound}
    files |= {(end, "image"): Item(end, "", "image") for end in ends if (end, "image") not in files}

    def look(item: Item):
        try:
            source, proven = records.find(item) or (decoders.inspect(item.path, item.kind), [])
            found = clips.plan(item, source, spec)
            stretches = clips.needed(found, spec) if found.timeline else []
            if missing := [stretch for stretch in stretches if stretch not in proven]:
                decoders.prove(item.path, missing, found.timeline)
            records.keep(item, source, proven + missing)
            return found, source
        except DataError as error:
            return error

    with Decoders(WORKERS) as decoders, ThreadPoolExecutor(WORKERS) as pool:
        found = list(tqdm(pool.map(look, files.values()), "reading files", len(files)))
    return dict(zip(files, found, strict=True))


def usable(item: Item, outcomes: dict, spec: ClipSpec, stills: bool) -> tuple[Probe, Source, str]:
    """An item's Probe and Source, and a hash of its files together. DataError where a run cannot use it."""
    if item.fault:
        raise DataError(item.fault)
    found = [outcomes[item.path, item.kind]]
    found += [outcomes[end, "image"] if end else None for end in (item.first_frame, item.last_frame)]
    for error in found:
        if isinstance(error, DataError):
            raise error
    (probe, source), *ends = found
    if not stills and item.kind == "image":
        raise DataError(
            f"{item.path}: an image is its own first frame: an image-to-video model has nothing to learn of it"
        )
    if not stills and min(clip.length for clip in probe.variants) == 1:
        raise DataError(
            f"{item.path}: too short: {source.timeline.frames} frames at {source.timeline.rate} fps are {probe.frames} "
            f"at {spec.fps}, and an image-to-video model needs 5"
        )
    digests = "/".join([source.digest, *(end[1].digest if end else "" for end in ends)])
    return probe, source, digests.rstrip("/")


class Records:
    """What earlier surveys found, on disk: a hash of the rest in the first line, and JSON. A file that is damaged, or
    of another version, is made anew. file: None to keep nothing."""

    def __init__(self, file: Path | None):
        self.file, self.known, self.changed = file, {}, False
        if file is not None and file.is_file():
            digest, _, text = file.read_bytes().partition(b"\n")
            if digest == self.digest(text):
                self.known = json.loads(text)
            else:
                print(f"{file} is damaged or of another version and is made anew", file=sys.stderr)

    @staticmethod
    def digest(text: bytes) -> bytes:
        return hashlib.blake2b(SURVEY_VERSION.encode() + text, digest_size=16).hexdigest().encode()

    @staticmethod
    def stamp(item: Item) -> list:
        try:
            status = item.path.stat()
        except OSError as error:
            raise DataError(f"{item.path}: cannot be read: {error}") from error
        return [item.kind, status.st_size, status.st_mtime_ns]

    def find(self, item: Item) -> tuple[Source, list[tuple[int, int]]] | None:
        """What the file holds and which stretches of it have been decoded, if it has not changed since."""
        record = self.known.get(str(item.path.absolute()))
        if record is None or record["stamp"] != self.stamp(item):
            return None
        source = dict(record["source"], notes=tuple(record["source"]["notes"]))
        if timeline := source["timeline"]:
            rates = {name: Fraction(timeline[name]) for name in ("rate", "tick")}
            source["timeline"] = Timeline(**(timeline | rates))
        return Source(**source), [tuple(stretch) for stretch in record["proven"]]

    def keep(self, item: Item, source: Source, proven: list[tuple[int, int]]):
        record = {"stamp": self.stamp(item), "source": asdict(source), "proven": [list(pair) for pair in proven]}
        if timeline := record["source"]["timeline"]:
            timeline |= {name: str(timeline[name]) for name in ("rate", "tick")}
        record["source"]["notes"] = list(source.notes)
        name = str(item.path.absolute())
        self.changed |= self.known.get(name) != record
        self.known[name] = record

    def write(self):
        if self.changed and self.file is not None:
            text = json.dumps(self.known).encode()
            self.file.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.file.with_name(f"{self.file.name}.{os.getpid()}.tmp")
            temporary.write_bytes(self.digest(text) + b"\n" + text)
            os.replace(temporary, self.file)
