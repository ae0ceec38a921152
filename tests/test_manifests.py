"""Folders and manifests: what every common trainer writes, in whatever encoding, becomes the same items."""

import json

import numpy as np
import pytest
from test_video import numbered, write_image, write_video

from manifests import DataError, Item, read_items, read_rows, write_rows

CAPTIONS = ["NA", "null", "123", 'two "lines",\nand \u2028 a comma']
KINDS = ["video", "image", "video", "image"]


def write_pair(folder, name, caption="a shape"):
    """An (empty) media file and its caption, for tests of manifests alone."""
    (folder / name).touch()
    (folder / name).with_suffix(".txt").write_text(caption)


def faults(items):
    return [item.fault for item in items if item.fault]


# ---- Folders


def test_folder(tmp_path):
    """Folders: order, upper-case endings, subfolders, captions with a byte order mark; hidden files stay out."""
    (tmp_path / "sub").mkdir()
    write_pair(tmp_path, "b.MP4", "\ufeffa dog\n")
    write_pair(tmp_path, "a.x.png", "ein Hündchen")
    write_pair(tmp_path / "sub", "c.WebM", "汉字")
    (tmp_path / "._b.mp4").touch()
    (tmp_path / "README.md").touch()
    found = [(item.path.name, item.caption, item.kind, item.fault) for item in read_items(tmp_path)]
    assert found == [
        ("a.x.png", "ein Hündchen", "image", ""),
        ("b.MP4", "a dog", "video", ""),
        ("c.WebM", "汉字", "video", ""),
    ]


def test_folder_faults(tmp_path):
    """A missing or empty caption and an ending that is not read are faults that name the file; the other items keep
    their own captions."""
    with pytest.raises(DataError, match="holds no files"):
        read_items(tmp_path)
    with pytest.raises(DataError, match="no such file or folder"):
        read_items(tmp_path / "elsewhere")
    (tmp_path / "a.mp4").touch()
    (tmp_path / "metadata.json").write_text("[]")
    write_pair(tmp_path, "b.mp4", " \n")
    write_pair(tmp_path, "c.tiff")
    write_pair(tmp_path, "d.mp4", "d")
    items = read_items(tmp_path)
    found = faults(items)
    assert len(found) == 3 and (items[3].caption, items[3].fault) == ("d", "")
    assert found[0].endswith(
        f"a.mp4: no caption: it needs a.txt beside it; or give the manifest {tmp_path / 'metadata.json'} as --data"
    )
    assert "b.txt: the caption is empty" in found[1] and "c.tiff: has a caption, but .tiff is none of" in found[2]


def test_captions_json(tmp_path):
    """diffusion-pipe's captions.json names the files of its own folder; several captions are several samples, and what
    it names in vain is told."""
    (tmp_path / "sub").mkdir()
    for name in ("a.mp4", "sub/a.mp4", "b.png"):
        (tmp_path / name).touch()
    (tmp_path / "captions.json").write_text('{"a.mp4": ["one", "two"], "b.png": "three", "gone.mp4": ["x"]}')
    (tmp_path / "sub" / "captions.json").write_text('{"a.mp4": ["four"]}')
    items = read_items(tmp_path)
    named = [(item.path.relative_to(tmp_path).as_posix(), item.caption) for item in items if not item.fault]
    assert named == [("a.mp4", "one"), ("a.mp4", "two"), ("b.png", "three"), ("sub/a.mp4", "four")]
    assert len(faults(items)) == 1 and "gone.mp4: is in captions.json, but there is no such file" in faults(items)[0]
    (tmp_path / "a.txt").write_text("five")
    assert "a.mp4: has captions in captions.json and in a.txt" in faults(read_items(tmp_path))[0]


def test_moving_pictures(tmp_path):
    """A GIF or WebP is a video if it moves and a still if not, by its content: taken for the other, a still has no
    second frame, and of an animation all but the first is lost without a word."""
    pictures = [numbered(i, 32, 64) for i in range(3)]
    write_video(tmp_path / "moves.gif", pictures, 10, "gif")
    write_video(tmp_path / "still.gif", pictures[:1], 10, "gif")
    write_video(tmp_path / "moves.webp", pictures, 10, "libwebp_anim")
    write_image(tmp_path / "still.webp", np.dstack([pictures[0], pictures[0][..., 0]]), "rgba", "libwebp", "bgra")
    (tmp_path / "broken.gif").write_bytes((tmp_path / "moves.gif").read_bytes()[:40])
    for file in list(tmp_path.iterdir()):
        file.with_name(f"{file.name[:-4]}.txt" if file.suffix == ".gif" else f"{file.stem}w.txt").write_text("x")
    for file in tmp_path.glob("*.webp"):
        file.rename(file.with_stem(f"{file.stem}w"))
    kinds = {item.path.name: item.kind for item in read_items(tmp_path)}
    videos, stills = ("moves.gif", "movesw.webp"), ("broken.gif", "still.gif", "stillw.webp")
    assert kinds == dict.fromkeys(videos, "video") | dict.fromkeys(stills, "image")


# ---- Manifests


@pytest.fixture
def clips(tmp_path, monkeypatch):
    """Four files, and their paths as manifests spell them: relative, absolute, from home, over the parent."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "my clips é"
    folder.mkdir()
    for name in ("a.mp4", "b.PNG", "c.webm", "d.jpg"):
        (folder / name).touch()
    name = folder.name
    return [f"{name}/a.mp4", str(folder / "b.PNG"), f"~/{name}/c.webm", f"..\\{tmp_path.name}\\{name}\\d.jpg"]


def same(items, tmp_path):
    assert not faults(items)
    assert [item.caption for item in items] == CAPTIONS
    assert [item.kind for item in items] == KINDS
    assert [item.path.resolve() for item in items] == sorted((tmp_path / "my clips é").iterdir())


@pytest.mark.parametrize("path, caption", [("file_path", "text"), ("video", "prompt"), ("image_path", "caption")])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_manifests_agree(clips, tmp_path, path, caption, encoding):
    """The same rows as JSON, JSONL and CSV, under the column names of VideoX-Fun, DiffSynth and musubi and in all that
    a text editor writes, give the same items: captions that look like numbers or missing values, commas, quotes, line
    breaks, blank lines, and the separators of Windows."""
    rows = [{path: p, caption: text} for p, text in zip(clips, CAPTIONS, strict=True)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    quoted = ['"' + text.replace('"', '""') + '"' for text in CAPTIONS]
    table = [f"{path}, {caption}", "", *(f"{p}, {cell}" for p, cell in zip(clips, quoted, strict=True)), ",", ""]
    texts = {
        "m.json": json.dumps(rows, ensure_ascii=False),
        "m.JSONL": "\r\n".join([lines[0], " ", *lines[1:], "", ""]),
        "m.csv": "\r\n".join(table),
        "excel.csv": "\r\n".join(line.replace(", ", ";", 1) for line in table[:-2]),
    }
    for name, text in texts.items():
        mark = "\ufeff" if encoding == "utf-16-be" else ""  # whose codec, unlike that of utf-16, writes none
        (tmp_path / name).write_bytes((mark + text).encode(encoding))
        same(read_items(tmp_path / name), tmp_path)


def test_named_encoding(tmp_path):
    """cp1252 is read where it is named and only there: guessed, it would read any file, most of them wrongly. The error
    names the byte and the option."""
    (tmp_path / "a.mp4").touch()
    (tmp_path / "a.txt").write_bytes("a café".encode("cp1252"))
    fault = read_items(tmp_path)[0].fault
    assert "a.txt: byte 5 is 0xe9, which is not utf-8;" in fault and "--encoding cp1252" in fault
    assert read_items(tmp_path, "cp1252")[0].caption == "a café"
    with pytest.raises(DataError, match="--encoding latin-x: there is no such encoding"):
        read_items(tmp_path, "latin-x")
    (tmp_path / "a.txt").write_bytes("a dog".encode("utf-16-le"))
    assert "a.txt: holds zero bytes; if it is UTF-16 without a mark, say --enc" in read_items(tmp_path)[0].fault
    (tmp_path / "a.txt").write_bytes("\ufeffa café".encode())  # a mark says more than the option
    assert read_items(tmp_path, "cp1252")[0].caption == "a café"


@pytest.mark.parametrize(
    "row, message",
    [
        ({"file_path": "a.mp4"}, "row 2: no caption"),
        ({"file_path": "a.mp4", "text": ""}, "row 2: no caption"),
        ({"file_path": "a.mp4", "text": None}, "row 2: no caption"),
        ({"file_path": "a.mp4", "text": "x", "prompt": "y"}, "row 2: no caption: it needs one"),
        ({"file_path": "a.mp4", "text": "  "}, "row 2: the caption is empty"),
        ({"file_path": "a.mp4", "text": 5}, "row 2: the caption is 5 and not text"),
        ({"file_path": "b.mp4", "text": "x"}, "row 2: no such file: "),
        ({"text": "x"}, "row 2: needs one path"),
        ({"video": "a.mp4", "image": "a.mp4", "text": "x"}, "row 2: needs one path"),
        ({"file_path": "m.json", "text": "x"}, "row 2: m.json is none of"),
        ({"file_path": "a.mp4", "text": "x", "type": "image"}, "row 2: type is 'image', but a.mp4 is video"),
        ({"file_path": "a.mp4", "text": "x", "first_frame": "b.png"}, "row 2: no such file: "),
        ({"file_path": "a.mp4", "text": "x", "end_image": "a.mp4"}, "row 2: a.mp4 is no picture, which end_image"),
    ],
)
def test_row_faults(tmp_path, row, message):
    """Whatever is wrong with a row is told with its number, and the others keep their captions; a KeyError would hide
    the file, a silent default would train on it, and a shift would give every later file its neighbour's caption."""
    (tmp_path / "a.mp4").touch()
    rows = [{"file_path": "a.mp4", "text": "first"}, row, {"file_path": "a.mp4", "text": "third"}]
    (tmp_path / "m.json").write_text(json.dumps(rows))
    first, second, third = read_items(tmp_path / "m.json")
    assert message in second.fault and not first.fault and not third.fault
    assert (first.caption, third.caption) == ("first", "third")


def test_end_frames(tmp_path):
    """Pictures for the first and the last frame are found beside the manifest, under any tool's names."""
    for name in ("a.mp4", "f.png", "l.jpg"):
        (tmp_path / name).touch()
    for first, last in [("first_frame", "last_frame"), ("input_image", "end_image")]:
        row = {"video": "a.mp4", "prompt": "x", first: "f.png", last: "l.jpg"}
        (tmp_path / "m.jsonl").write_text(json.dumps(row))
        expected = Item(tmp_path / "a.mp4", "x", "video", tmp_path / "f.png", tmp_path / "l.jpg")
        assert read_items(tmp_path / "m.jsonl") == [expected]


def test_other_columns(tmp_path):
    """Columns that are not used are told of, and one that looks like a slip of a known one is an error: a first_frame
    that is passed over would train another model than was asked for."""
    (tmp_path / "a.mp4").touch()
    row = {"file_path": "a.mp4", "text": "x", "width": 5, "score": 0.5, "control_file_path": "c.mp4", "text_en": "y"}
    (tmp_path / "m.json").write_text(json.dumps([row]))
    notes = []
    assert not faults(read_items(tmp_path / "m.json", notes=notes))
    assert notes == [f"{tmp_path / 'm.json'}: columns not used: score, control_file_path, text_en"]
    for name, known in [("frist_frame", "first_frame"), ("captoin", "caption"), ("FilePath", "file_path")]:
        (tmp_path / "m.json").write_text(json.dumps([row, {name: "b"}]))
        with pytest.raises(DataError, match=f"row 2: unknown column '{name}'; did you mean '{known}'"):
            read_items(tmp_path / "m.json")


def test_file_errors(tmp_path):
    """Files that are no JSON, JSONL or CSV at all are named with the line at fault."""
    for name, content, message in [
        ("a.json", b"{", "a.json: not JSON"),
        ("b.json", b"{}", "b.json: is not a list"),
        ("b2.json", b'["x.mp4"]', "b2.json, row 1: is not an object"),
        ("c.jsonl", b'{"file_path": 1}\n{', "c.jsonl, line 2: not JSON"),
        ("d.csv", b"video,prompt\nx.mp4,a,b\n", "d.csv, row 1: has more cells than columns"),
        ("e.csv", b"video,video\nx.mp4,a\n", "e.csv: has two columns 'video'"),
        ("f.csv", b"video,prompt\nx.mp4,\xff\n", "f.csv: byte 19 is 0xff"),
        ("f2.csv", b'video,prompt\nx.mp4,"a\n', "f2.csv: not a CSV file"),
        ("g.parquet", b"", "g.parquet: neither a folder nor"),
        ("h.csv", b"video,prompt\n", "h.csv: holds no files"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            read_items(tmp_path / name)


def test_written_rows_read_back(tmp_path):
    """What `fill` writes keeps cells, columns and their order in each of the formats."""
    rows = [{"video": "é.mp4", "prompt": 'a "b",\n c', "x": "1"}, {"video": "b.mp4", "prompt": "NA", "x": "2"}]
    for name in ("m.json", "m.jsonl", "m.csv"):
        write_rows(tmp_path / name, rows)
        read = [row for _, row in read_rows(tmp_path / name)[0]]
        assert read == rows and list(read[0]) == ["video", "prompt", "x"]
