"""Captioned files: folders and manifests (json, jsonl, csv) as a list of items."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

VIDEO_ENDINGS = (".mp4", ".mov", ".m4v", ".mkv", ".webm", ".avi")
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
ENDINGS = " ".join(VIDEO_ENDINGS + IMAGE_ENDINGS)
PATH_COLUMNS = ("file_path", "video", "image")  # those whose name says the kind need no `type`
CAPTION_COLUMNS = ("text", "prompt")
OTHER_COLUMNS = ("type", "width", "height")  # sizes are read from the files; other tools want them in the manifest


class DataError(ValueError):
    """Something is wrong with the user's data; the message names the file or row."""


@dataclass(frozen=True)
class Item:
    """One captioned file. `kind` is "video" or "image"."""

    path: Path
    caption: str
    kind: str
    first_frame: Path | None = None  # a picture in place of the clip's own first frame, for image to video
    last_frame: Path | None = None


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
