"""The data before training: what is wrong with it, what a run will see of it, and all of it encoded ahead.

    python data.py check clips/ b.csv:3 --model wan2.1-t2v-1.3b --frames 81       what a run will see of it
    python data.py fill clips.csv --out filled.csv                                adds width, height, frames and fps
    torchrun --nproc-per-node 8 data.py cache clips/ --model ... --vae ...        fills the cache that train.py reads

`check` does what train.py does first (survey.py) and reports more; `cache` does what it does next (encode.py).
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from tqdm import tqdm

import clips
import manifests
import stream
import video
from clips import ClipSpec, Probe, Variant
from manifests import DataError
from model import CONFIGS
from options import exit_with, parse
from survey import WORKERS, DataOptions, Survey, clip_spec, describe_dropped, examine, settled
from workers import Decoders

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
    if argv[:1] == ["cache"]:
        import encode  # only now: the encoders and torch.distributed take as long to import as all the rest

        commands["cache"] = encode.fill_cache, encode.CacheOptions
    if not argv or argv[0] not in commands:
        raise ValueError("say what to do: python data.py check|fill|cache MANIFEST... [options]")
    command, options = commands[argv[0]]
    words = ["--out" if word == "-o" else word for word in argv[1:]]
    files = list(takewhile(lambda word: not word.startswith("-"), words))
    return command(parse(options, words[len(files) :] + (["--data", *files] if files else []), __doc__))


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except (ValueError, RuntimeError, OSError) as error:
        exit_with("data.py", error, os.environ.get("LOCAL_RANK", "0") == "0")  # as torchrun says
    sys.exit(code)
