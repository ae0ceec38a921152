"""What to sample: prompts, with the pictures that a model takes besides, from the command line, a file or the demo.

A file has a prompt per line, or, as .jsonl, rows of `prompt`, `image` and `last_image`, paths relative to the file.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import decode
import demo
from presets import PRESETS, Preset


@dataclass(frozen=True)
class Request:
    """One video to be made. Pictures are (H, W, 3) uint8."""

    prompt: str
    image: np.ndarray | None = None
    last_image: np.ndarray | None = None


def requests_of(config) -> list[Request]:
    """What the command line asks for."""
    preset = PRESETS[config.model]
    for name in ("image", "last_image"):
        given, prompts = len(getattr(config, name)), len(config.prompt)
        if given and given not in (1, prompts) or given > prompts:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag}: {given} pictures for {prompts} --prompt; give one, or one of each")
    if not config.prompt and not config.prompts and preset.demo:
        return demo_requests(preset)
    rows = read_rows(config.prompts) if config.prompts else []
    for i, prompt in enumerate(config.prompt):
        pictures = {name: getattr(config, name) for name in ("image", "last_image")}
        rows.append({"prompt": prompt} | {name: paths[i % len(paths)] for name, paths in pictures.items() if paths})
    if not rows:
        raise ValueError('nothing to sample: give --prompt "..." or --prompts FILE')
    return [request_of(row, preset.condition) for row in rows]


def read_requests(path: str, condition: str) -> list[Request]:
    """The requests of a --prompts file for a model with this kind of condition (presets.py)."""
    return [request_of(row, condition) for row in read_rows(path)]


def requests_for_training(config) -> list[Request]:
    """What train.py samples: --prompts, or the demo's; nothing with --no-sample, or where one of two experts trains."""
    preset = PRESETS[config.model]
    if preset.boundary and config.expert != "both":
        if config.sample and config.prompts:
            raise ValueError(
                f"--prompts: it takes both experts to sample, --expert {config.expert} trains one; leave it out"
            )
        return []
    if not config.sample or not (config.prompts or preset.demo):
        return []
    return read_requests(config.prompts, preset.condition) if config.prompts else demo_requests(preset)


def read_rows(path: str) -> list[dict]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"--prompts {file}: no such file")
    lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    if file.suffix != ".jsonl":
        return [{"prompt": line} for line in lines]
    return [read_row(line, f"--prompts {file}, row {i}", file.parent) for i, line in enumerate(lines, 1)]


def read_row(line: str, where: str, folder: Path) -> dict[str, str]:
    """A row of JSON; its pictures' paths are relative to the file's folder."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: is no JSON ({error})") from error
    if not isinstance(row, dict) or "prompt" not in row or row.keys() - {"prompt", "image", "last_image"}:
        found = ", ".join(row) if isinstance(row, dict) else line
        raise ValueError(f"{where}: has {found}; wanted: prompt, image, last_image")
    if not all(isinstance(value, str) for value in row.values()):
        raise ValueError(f"{where}: its values are not all text")
    return {k: v if k == "prompt" else str(folder / Path(v).expanduser()) for k, v in row.items()}


def request_of(row: dict, condition: str) -> Request:
    """A row with its pictures read; ValueError unless they are those that the model takes."""
    needed = {"first": {"image"}, "first-last": {"image", "last_image"}}.get(condition, set())
    possible = needed | ({"image"} if condition == "first-latent" else set())
    given = row.keys() - {"prompt"}
    if needed - given or given - possible:
        names = " and ".join("--" + name.replace("_", "-") for name in sorted(possible)) or "no image"
        raise ValueError(
            f"this model takes {names}; the prompt {row['prompt']!r} has "
            f"{' and '.join(sorted(given)).replace('_', '-') or 'none'}"
        )
    return Request(row["prompt"], **{name: decode.picture(Path(row[name]).expanduser()) for name in given})


def demo_requests(preset: Preset) -> list[Request]:
    """The demo's held-out prompts, with the first (and last) frames of the clips that they describe."""
    requests = []
    for scene, prompt in zip(demo.HELD_OUT_SCENES, demo.HELD_OUT_PROMPTS, strict=True):
        frames = demo.draw(scene, np.random.default_rng(0))
        pictures = {"image": frames[0]} if preset.condition else {}
        pictures |= {"last_image": frames[-1]} if preset.condition == "first-last" else {}
        requests.append(Request(prompt, **pictures))
    return requests
