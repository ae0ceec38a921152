"""Captioned files: folders and manifests (json, jsonl, csv) as lists of items.

Every trainer has a manifest of its own; what the common ones call their columns is in the tables below. What is wrong
with one row becomes that item's `fault`: the survey (data.py) lists all faults together and drops no item without a
word. What is wrong with a manifest as a whole raises DataError.
"""

import codecs
import csv
import difflib
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pictures

VIDEO_ENDINGS = (".mp4", ".mov", ".m4v", ".mkv", ".webm", ".avi")
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp")
EITHER_ENDINGS = (".gif", ".webp")  # a video if it moves
ENDINGS = " ".join(VIDEO_ENDINGS + IMAGE_ENDINGS + EITHER_ENDINGS)

# Columns by what they hold: the names of VideoX-Fun, DiffSynth, musubi, FastVideo and Hugging Face's folders.
COLUMNS = {
    "path": ("file_path", "video", "image", "video_path", "image_path", "path", "file", "file_name", "media_path"),
    "caption": ("text", "prompt", "caption"),
    "type": ("type",),
    "first_frame": ("first_frame", "first_image", "first_frame_path", "start_image", "start_frame", "input_image"),
    "last_frame": ("last_frame", "last_image", "last_frame_path", "end_image", "end_frame"),
    "size": ("width", "height", "frames", "num_frames", "fps", "duration"),  # read from the files themselves
    "": ("control_file_path", "control_path", "control_video", "reference_image", "vace_video", "vace_video_mask")
    + ("vace_reference_image", "negative_prompt", "seed"),  # for models and uses that picowan has not
}
MEANING = {name: meaning for meaning, names in COLUMNS.items() for name in names}
MARKS = (  # byte order marks; the longer first, since the one of UTF-16 begins that of UTF-32
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


class DataError(ValueError):
    """Something is wrong with the user's data; the message names the file or row."""


@dataclass(frozen=True)
class Item:
    """One captioned file. `kind` is "video" or "image"."""

    path: Path
    caption: str
    kind: str
    first_frame: Path | None = None  # pictures that stand in for the clip's own, for image-to-video models
    last_frame: Path | None = None
    fault: str = ""  # why it cannot be used, naming its file or row


def read_items(path: Path | str, encoding: str = "", notes: list[str] | None = None) -> list[Item]:
    """The captioned files of a folder or manifest, faulty ones included.

    A folder, with its subfolders, has NAME.mp4 beside NAME.txt, or a captions.json of {"NAME.mp4": [captions]}. A
    manifest row has a path (absolute, ~, or relative to the manifest), a caption and maybe a type and pictures for the
    first and last frame, see COLUMNS. Text is UTF-8, or UTF-16 with its mark, or `encoding`. Columns that are not used
    are added to `notes`. Raises DataError for a manifest that cannot be read, and one without any file.
    """
    path = Path(path).expanduser()
    try:
        codecs.lookup(encoding or "utf-8")
    except LookupError as error:
        raise DataError(f"--encoding {encoding}: there is no such encoding; cp1252 and utf-16-le are some") from error
    if path.is_dir():
        items = list(folder_items(path, encoding))
    else:
        rows, names = read_rows(path, encoding)
        unused = [name or "(without a name)" for name, meaning in names.items() if not meaning]
        if unused and notes is not None:
            notes.append(f"{path}: columns not used: {', '.join(unused)}")
        items = [row_item(path.parent, where, row, names) for where, row in rows]
    if not items:
        raise DataError(f"{path}: holds no files with the endings {ENDINGS}")
    return items


# ---- Folders


def folder_items(folder: Path, encoding: str) -> Iterator[Item]:
    """Every video and image below the folder, hidden ones aside, in the order of their names."""
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    names = [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
    texts = {name[:-4]: folder / name for name in names if name.lower().endswith(".txt")}
    manifests = [name for name in names if name.lower().endswith((".json", ".jsonl", ".csv"))]
    listed = listed_captions(folder, manifests, encoding)
    hint = f"; or give the manifest {folder / manifests[0]} as --data" if manifests and not listed else ""
    for name in names:
        file, text = folder / name, texts.get(name.removesuffix(Path(name).suffix))
        captions = listed.pop(name, [])
        kind = kind_of(file)
        if text == file or not (kind or text or captions):
            continue
        if kind is None:
            ending = file.suffix or "its ending"
            yield Item(file, "", "image", fault=f"{file}: has a caption, but {ending} is none of {ENDINGS}")
        elif text and captions:
            yield Item(file, "", kind, fault=f"{file}: has captions in captions.json and in {text.name}")
        elif text:
            try:
                yield captioned(Item(file, read_text(text, encoding), kind), str(text))
            except DataError as error:
                yield Item(file, "", kind, fault=str(error))
        elif captions:  # each of them is a sample of its own
            for caption in captions:
                yield captioned(Item(file, caption, kind), f"{file} in captions.json")
        else:
            where = file.with_suffix(".txt").name
            yield Item(file, "", kind, fault=f"{file}: no caption: it needs {where} beside it{hint}")
    for name in listed:
        yield Item(folder / name, "", "image", fault=f"{folder / name}: is in captions.json, but there is no such file")


def listed_captions(folder: Path, manifests: list[str], encoding: str) -> dict[str, list]:
    """{file: its captions} of every captions.json, which names the files of its own folder."""
    listed = {}
    for name in manifests:
        file = folder / name
        if file.name == "captions.json":
            table = parse_json(str(file), read_text(file, encoding))
            if not isinstance(table, dict):
                raise DataError(f'{file}: is not an object {{"file": ["caption", ...], ...}}')
            for key, captions in table.items():
                inside = (Path(name).parent / key).as_posix()
                listed[inside] = captions if isinstance(captions, list) else [captions]
    return listed


# ---- Manifests


def read_rows(path: Path, encoding: str = "") -> tuple[list[tuple[str, dict]], dict[str, str]]:
    """A manifest's rows, each as (where it stands, {column: cell}); and what each column holds, see `columns`."""
    readers = {".json": json_rows, ".jsonl": jsonl_rows, ".csv": csv_rows}
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder")
    if path.suffix.lower() not in readers:
        raise DataError(f"{path}: neither a folder nor a .json, .jsonl or .csv manifest")
    rows = [(f"{path}, {where}", row) for where, row in readers[path.suffix.lower()](path, encoding)]
    return rows, columns(rows)


def json_rows(path: Path, encoding: str) -> list[tuple[str, object]]:
    rows = parse_json(str(path), read_text(path, encoding))
    if not isinstance(rows, list):
        raise DataError(f"{path}: is not a list of rows, [{{...}}, ...]")
    return [(f"row {i}", row) for i, row in enumerate(rows, 1)]


def jsonl_rows(path: Path, encoding: str) -> list[tuple[str, object]]:
    lines = enumerate(read_text(path, encoding).split("\n"), 1)  # splitlines() would split at U+2028 in a caption too
    return [(f"line {i}", parse_json(f"{path}, line {i}", line)) for i, line in lines if line.strip()]


def csv_rows(path: Path, encoding: str) -> list[tuple[str, object]]:
    """Rows of a CSV. Every cell is text: a caption "NA", "null" or "123" stays what it is. Columns are separated by
    commas, or by what stands in their place in the header (spreadsheets write semicolons in some countries)."""
    text = read_text(path, encoding)
    header = text.split("\n", 1)[0]
    comma = max(",;\t", key=header.count)
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=comma, strict=True, skipinitialspace=True)
        rows = [(f"row {i}", row) for i, row in enumerate(reader, 1)]
    except csv.Error as error:
        raise DataError(f"{path}: not a CSV file: {error}") from error
    names = reader.fieldnames or []
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{path}: has two columns {twice[0]!r}")
    for where, row in rows:
        if None in row:
            raise DataError(f"{path}, {where}: has more cells than columns; a caption with a comma needs quotes")
    return [(where, row) for where, row in rows if any(row.values())]


def write_rows(path: Path, rows: list[dict]) -> None:
    """Writes a manifest of the format that its ending says, in UTF-8."""
    if path.suffix.lower() == ".json":
        text = json.dumps(rows, ensure_ascii=False, indent=1)
    elif path.suffix.lower() == ".jsonl":
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    elif path.suffix.lower() == ".csv":
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
        text = table.getvalue()
    else:
        raise DataError(f"{path}: is none of .json, .jsonl and .csv")
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8", newline="")
    temporary.replace(path)


def columns(rows: list[tuple[str, object]]) -> dict[str, str]:
    """{column: what it holds} of all rows; "" for those that are not used. One that looks like a slip of the keyboard
    is an error, since ignoring it would be worse."""
    found = {}
    for where, row in rows:
        if not isinstance(row, dict):
            raise DataError(f"{where}: is not an object {{...}}")
        for name in [name for name in row if name not in found]:
            plain = name.strip().lower()
            near = difflib.get_close_matches(plain, MEANING, 1, 0.8)
            if plain not in MEANING and near and near[0] not in re.split(r"\W|_", plain):
                raise DataError(f"{where}: unknown column {name!r}; did you mean {near[0]!r}?")
            found[name] = MEANING.get(plain, "")
    return found


def row_item(folder: Path, where: str, row: dict, names: dict[str, str]) -> Item:
    """The item of one manifest row, with a fault where something about it is wrong."""
    file, kind, ends = folder, "image", {}
    try:
        file, kind = row_file(folder, where, row, names)
        for given in cells(row, names, "type").values():
            if given != kind:
                raise DataError(f"{where}: type is {given!r}, but {file.name} is {kind}")
        ends = {name: end_frame(folder, where, cells(row, names, name)) for name in ("first_frame", "last_frame")}
        captions = list(cells(row, names, "caption").values())
        if len(captions) != 1:
            raise DataError(f"{where}: no caption: it needs one in one of {', '.join(COLUMNS['caption'])}")
    except DataError as error:
        return Item(file, "", kind, fault=str(error))
    return captioned(Item(file, captions[0], kind, **ends), where)


def row_file(folder: Path, where: str, row: dict, names: dict[str, str]) -> tuple[Path, str]:
    """The file that a row is about, and its kind."""
    paths = list(cells(row, names, "path").values())
    if len(paths) != 1 or not isinstance(paths[0], str):
        raise DataError(f"{where}: needs one path, as text, in one of {', '.join(COLUMNS['path'])}")
    file = find_file(folder, where, paths[0])
    kind = kind_of(file)
    if kind is None:
        raise DataError(f"{where}: {file.name} is none of {ENDINGS}")
    return file, kind


def cells(row: dict, names: dict[str, str], meaning: str) -> dict[str, object]:
    """{column: cell} of those that hold `meaning` and are not empty."""
    return {name: cell for name, cell in row.items() if names[name] == meaning and cell not in (None, "")}


def find_file(folder: Path, where: str, name: str) -> Path:
    """The file that a manifest in `folder` names; backslashes are tried as the separators they are on Windows."""
    for spelling in (name, name.replace("\\", "/")):
        file = folder / Path(spelling).expanduser()  # an absolute path wins over the folder
        if file.is_file():
            return file
        if file.exists():
            raise DataError(f"{where}: is no regular file: {file}")
    raise DataError(f"{where}: no such file: {folder / Path(name).expanduser()}")


def end_frame(folder: Path, where: str, given: dict[str, object]) -> Path | None:
    """The picture that stands in for a clip's first or last frame, of {column: cell}."""
    if not given:
        return None
    name, *more = given.values()
    if more or not isinstance(name, str):
        raise DataError(f"{where}: needs one path, as text, in {' and '.join(given)}")
    file = find_file(folder, where, name)
    if kind_of(file) != "image":
        raise DataError(f"{where}: {file.name} is no picture, which {next(iter(given))} has to be")
    return file


def kind_of(file: Path) -> str | None:
    ending = file.suffix.lower()
    if ending in EITHER_ENDINGS:
        return "video" if pictures.animated(file) else "image"
    return "video" if ending in VIDEO_ENDINGS else "image" if ending in IMAGE_ENDINGS else None


# ---- Text


def captioned(item: Item, where: str) -> Item:
    """The item with its caption stripped, or with a fault where that is no text."""
    if not isinstance(item.caption, str):
        return replace(item, caption="", fault=f"{where}: the caption is {item.caption!r} and not text")
    fault = f"{where}: the caption is empty; to train without captions use --caption-dropout"
    return replace(item, caption=item.caption.strip(), fault="" if item.caption.strip() else fault)


def read_text(path: Path, encoding: str = "") -> str:
    """A text file, whatever the locale: by its byte order mark; without one it is `encoding`, or UTF-8."""
    data = path.read_bytes()
    mark, name = next((pair for pair in MARKS if data.startswith(pair[0])), (b"", encoding or "utf-8"))
    try:
        text = data[len(mark) :].decode(name)
    except UnicodeDecodeError as error:
        at = error.start + len(mark)
        raise DataError(
            f"{path}: byte {at} is 0x{data[at]:02x}, which is not {name}; save the file as UTF-8, or name its "
            "encoding, as in --encoding cp1252"
        ) from error
    if "\0" in text:
        raise DataError(f"{path}: holds zero bytes; if it is UTF-16 without a mark, say --encoding utf-16-le")
    return text


def parse_json(where: str, text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error}") from error
