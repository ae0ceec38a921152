"""The data before training: every file is opened, and whatever is wrong with one is said.

    python data.py check clips/ b.csv:3 --model wan2.1-t2v-1.3b --frames 81       what a run will see of it
    python data.py fill clips.csv --out filled.csv                                adds width, height, frames and fps

`survey` is what train.py does first, and `check` does the same and reports more. No sample is dropped or replaced
without a word: the faulty ones are listed together, and without --allow-drop they are the end of it. What a file holds
and which of its frames have been decoded is kept in CACHE/survey.json, under its path, size and time of change.
"""

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import takewhile
from pathlib import Path
from typing import Literal

from tqdm import tqdm

import clips
import manifests
import stream
import video
from clips import ClipSpec, Probe, Variant
from decode import Source, Timeline
from manifests import DataError, Item
from model import CONFIGS
from options import exit_with, parse
from presets import PRESETS
from vae import VAE_CONFIGS
from workers import Decoders

WORKERS = min(16, os.cpu_count() or 1)  # one decoding process per core, and not hundreds on a large machine
SURVEY_VERSION = "1"  # to be raised when decode.Source changes


@dataclass(frozen=True)
class DataOptions:
    """The options of train.py and of `check` that say what the samples are."""

    model: str = "demo"  # preset, see CONFIGS in model.py
    data: tuple[str, ...] = ()  # folders or manifests (json, jsonl, csv), each with a weight or none, as in a.json:3
    # b/:1, for draws in that ratio; without weights an epoch is every item once; empty: the demo set, written on first
    # use
    cache: str = "cache"  # folder of encoded latents and text, shared by all ranks
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
    of another version, is made anew. Without a file nothing is kept."""

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


# ---- check


@dataclass(frozen=True)
class CheckOptions(DataOptions):
    ranks: int = 8  # data-parallel ranks to expect the balance of
    batch_size: int = 32  # samples per optimizer step, over the whole job
    pack_tokens: int = 0  # most tokens a rank takes in one pack; 0: its whole share of the batch in one
    seed: int = 0  # of the order of samples and clips
    steps: int = 20  # so many steps are looked at for the balance
    sheet: str = "check.png"  # contact sheet of what the model will see
    sheet_rows: int = 16  # of so many samples, evenly spread


def check(config: CheckOptions) -> int:
    """Reports on the data; returns the exit code: 1 if samples are dropped without --allow-drop."""
    if not config.data:
        raise ValueError("say what to check: python data.py check MANIFEST...")
    if config.model not in PRESETS:
        raise ValueError(f"--model {config.model} is none of {', '.join(PRESETS)}")
    config = replace(config, **settled(config))
    spec, found = clip_spec(config), examine(config, config.data)
    tokens = [[token_count(clip, spec) for clip in probe.variants] for probe in found.probes]
    print(f"{len(found.items)} samples can be used:")
    for item, probe, counts in zip(found.items, found.probes, tokens, strict=True):
        became = Counter(f"{shape_of(clip)}, {n} tokens" for clip, n in zip(probe.variants, counts, strict=True))
        print(f"  {item.path}: {describe(probe)} -> {'; '.join(f'{n} x {shape}' for shape, n in became.items())}")
    print("clips by shape (width x height x frames):")
    shapes = Counter(shape_of(clip) for probe in found.probes for clip in probe.variants)
    for shape, n in shapes.most_common():
        print(f"  {shape:>16} {n:6} {'#' * round(50 * n / shapes.most_common(1)[0][1])}")
    print(describe_balance(config, found, tokens))
    write_sheet(config, found, spec)
    print(f"contact sheet: {config.sheet}")
    for note in found.notes:
        print(note)
    if found.dropped:
        print(describe_dropped(found))
    return 1 if found.dropped and not config.allow_drop else 0


def shape_of(clip: Variant) -> str:
    return f"{clip.width}x{clip.height}x{clip.length}"


def token_count(clip: Variant, spec: ClipSpec) -> int:
    return (1 + (clip.length - 1) // 4) * (clip.height // spec.multiple) * (clip.width // spec.multiple)


def describe(found: Probe) -> str:
    if not found.timeline:
        return f"picture of {found.width}x{found.height}"
    how = "" if found.timeline.steady else " on average"
    return f"{found.width}x{found.height}, {found.timeline.frames} frames at {float(found.timeline.rate):.6g} fps{how}"


@dataclass(frozen=True)
class Counts:
    """As much of a dataset as the position stream asks for: how many variants each item has."""

    mixture: stream.Mixture
    tokens: list[list[int]]

    def variants(self, index: int) -> int:
        return len(self.tokens[index])


def describe_balance(config: CheckOptions, found: Survey, tokens: list[list[int]]) -> str:
    """How evenly the cost of the first steps lies on the ranks, by the draws and packs that training would make."""
    wan, dataset, idle, packs = CONFIGS[config.model], Counts(found.mixture, tokens), [], []
    for step in range(config.steps):
        drawn = stream.draws(step, config.batch_size, config.seed, dataset)
        counts = [tokens[draw.index][draw.variant] for draw in drawn]
        costs = [stream.sample_cost(n, wan.dim, wan.ffn_dim, wan.text_len) for n in counts]
        assigned = stream.assign_packs(counts, costs, config.ranks, config.pack_tokens)
        idle.append(stream.idle_share([stream.loads_of(assigned, costs)]))
        packs.append(max(len(share) for share in assigned))
    return (
        f"balance on {config.ranks} ranks, {config.batch_size} samples a step: ranks wait {sum(idle) / len(idle):.1%} "
        f"of the time on average and {max(idle):.1%} in the worst of {len(idle)} steps; packs per rank: {max(packs)}"
    )


def write_sheet(config: CheckOptions, found: Survey, spec: ClipSpec):
    """One row for each of some samples: the first of its clips, as the model will see it."""
    rows = min(config.sheet_rows, len(found.items))
    shown = [i * (len(found.items) - 1) // max(1, rows - 1) for i in range(rows)]
    with Decoders(1, threads=0) as decoders:
        seen = [clips.load_clip(found.items[i], found.probes[i], spec, 0, decoders) for i in shown]
    video.contact_sheet(config.sheet, seen)


# ---- fill


@dataclass(frozen=True)
class FillOptions:
    data: tuple[str, ...] = ()  # one manifest or folder
    out: str = ""  # the manifest to write, beside the old one as its paths are relative to it. Empty: NAME.filled.json
    # for NAME.json, and metadata.json in a folder
    encoding: str = ""  # of captions and manifests without a byte order mark, e.g. cp1252; empty: UTF-8


def fill(config: FillOptions) -> int:
    """Writes a manifest with the columns width, height, frames and fps, read from the files; all else stays as it was.
    Returns the exit code: 1 if some rows could not be filled."""
    if len(config.data) != 1:
        raise ValueError("say what to fill: python data.py fill MANIFEST")
    path = Path(config.data[0]).expanduser()
    folder = path if path.is_dir() else path.parent
    out = Path(
        config.out or (path / "metadata.json" if path.is_dir() else f"{path.with_suffix('')}.filled{path.suffix}")
    )
    if out.resolve().parent != folder.resolve():
        raise ValueError(f"--out {out} must lie in {folder}, since the paths in it are relative")
    if out.exists() and not config.out:
        raise ValueError(f"{out} is there already; name it as --out to write over it")
    rows, look = rows_to_fill(path, config.encoding)

    def sizes(number: int) -> dict | DataError:
        try:
            file, kind = look(number)
            source = decoders.inspect(file, kind)
        except DataError as error:
            return error
        timeline = source.timeline
        rate = timeline and (int(timeline.rate) if timeline.rate.denominator == 1 else round(float(timeline.rate), 6))
        frames = timeline.frames if timeline else 1
        return {"width": source.width, "height": source.height, "frames": frames, "fps": rate}

    with Decoders(WORKERS) as decoders, ThreadPoolExecutor(WORKERS) as pool:
        found = list(tqdm(pool.map(sizes, range(len(rows))), "reading files", len(rows)))
    errors = [str(error) for error in found if isinstance(error, DataError)]
    filled = [row if isinstance(more, DataError) else row | more for row, more in zip(rows, found, strict=True)]
    manifests.write_rows(out, filled)
    print(f"{out}: {len(rows) - len(errors)} of {len(rows)} rows filled")
    print(*errors, sep="\n", end="\n" if errors else "")
    return 1 if errors else 0


def rows_to_fill(path: Path, encoding: str) -> tuple[list[dict], Callable[[int], tuple[Path, str]]]:
    """The rows of a manifest, or of what could be one for a folder; and a function that finds row i's file and kind."""
    if path.is_dir():
        items = [item for item in manifests.read_items(path, encoding) if item.path.is_file()]
        rows = [
            {"file_path": item.path.relative_to(path).as_posix(), "text": item.caption, "type": item.kind}
            for item in items
        ]
        return rows, lambda i: (items[i].path, items[i].kind)
    placed, names = manifests.read_rows(path, encoding)
    return [row for _, row in placed], lambda i: manifests.row_file(path.parent, *placed[i], names)


# ---- The command line


def main(argv: Sequence[str]) -> int:
    commands = {"check": (check, CheckOptions), "fill": (fill, FillOptions)}
    if not argv or argv[0] not in commands:
        raise ValueError("say what to do: python data.py check|fill MANIFEST... [options]")
    command, options = commands[argv[0]]
    words = ["--out" if word == "-o" else word for word in argv[1:]]
    files = list(takewhile(lambda word: not word.startswith("-"), words))
    return command(parse(options, words[len(files) :] + (["--data", *files] if files else []), __doc__))


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except (ValueError, RuntimeError, OSError) as error:
        exit_with("data.py", error)
    sys.exit(code)
