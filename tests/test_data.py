"""Data: manifests, and the cache of latents."""

import json
import threading
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from test_video import numbered, write_image, write_video

from cache import LatentDataset, fingerprint, sample_key, survey, text_key, write_tensors
from clips import ClipSpec, load_clip, probe
from manifests import DataError, Item, read_items


def write_pair(folder, name, caption="a shape"):
    """An (empty) media file and its caption, for tests of manifests alone."""
    (folder / name).touch()
    (folder / name).with_suffix(".txt").write_text(caption)


# ---- Manifests


def test_folder(tmp_path):
    """Folders: order, upper-case endings, subfolders, captions with a byte order mark; hidden files stay out."""
    (tmp_path / "sub").mkdir()
    write_pair(tmp_path, "b.MP4", "\ufeffa dog\n")
    write_pair(tmp_path, "a.x.png", "ein Hündchen")
    write_pair(tmp_path / "sub", "c.WebM", "汉字")
    (tmp_path / "._b.mp4").touch()
    (tmp_path / "README.md").touch()
    found = [(item.path.name, item.caption, item.kind) for item in read_items(tmp_path)]
    assert found == [("a.x.png", "ein Hündchen", "image"), ("b.MP4", "a dog", "video"), ("c.WebM", "汉字", "video")]


def test_folder_errors(tmp_path):
    """A missing or empty caption, an ending that is not read, and an empty folder are errors that name the file."""
    with pytest.raises(DataError, match="holds no files"):
        read_items(tmp_path)
    (tmp_path / "a.mp4").touch()
    with pytest.raises(DataError, match=r"a\.mp4: needs its caption in a\.txt"):
        read_items(tmp_path)
    (tmp_path / "metadata.json").write_text("[]")
    with pytest.raises(DataError, match="metadata.json as --data"):
        read_items(tmp_path)
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(DataError, match=r"a\.txt: the caption is empty"):
        read_items(tmp_path)
    (tmp_path / "a.txt").write_text("a dog")
    write_pair(tmp_path, "b.gif")
    with pytest.raises(DataError, match=r"b\.gif: has a caption, but \.gif is none of"):
        read_items(tmp_path)
    with pytest.raises(DataError, match="no such file or folder"):
        read_items(tmp_path / "elsewhere")


def test_manifests_agree(tmp_path, monkeypatch):
    """The same rows as JSON, JSONL and CSV give the same items: relative, absolute and ~ paths, captions that look like
    numbers or missing values, commas, quotes, line breaks, and a byte order mark."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "my clips"
    folder.mkdir()
    for name in ("a.mp4", "b.PNG", "c.webm", "d.jpg"):
        (folder / name).touch()
    paths = ["my clips/a.mp4", str(folder / "b.PNG"), "~/my clips/c.webm", "../" + tmp_path.name + "/my clips/d.jpg"]
    captions = ["NA", "null", "123", 'two "lines",\nand \u2028 a comma']
    kinds = ["video", "image", "video", "image"]
    rows = [
        {"file_path": path, "text": text, "type": kind, "width": 8, "height": 8}
        for path, text, kind in zip(paths, captions, kinds, strict=True)
    ]
    (tmp_path / "m.json").write_text("\ufeff" + json.dumps(rows), encoding="utf-8")
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (tmp_path / "m.jsonl").write_text("\n".join(["\ufeff" + lines[0], lines[1], "", *lines[2:], ""]), encoding="utf-8")
    cells = ['"' + text.replace('"', '""') + '"' for text in captions]
    for column, mark in (("video", ""), ("image", "\ufeff")):
        table = [f"{column},prompt", *(f"{path},{cell}" for path, cell in zip(paths, cells, strict=True))]
        (tmp_path / f"{column}.csv").write_text(mark + "\r\n".join(table), encoding="utf-8", newline="")
    for name in ("m.json", "m.jsonl", "video.csv", "image.csv"):
        items = read_items(tmp_path / name)
        assert [item.caption for item in items] == captions, name
        assert [item.kind for item in items] == kinds, name
        assert [item.path.resolve() for item in items] == sorted(folder.iterdir()), name


@pytest.mark.parametrize(
    "row, message",
    [
        ({"file_path": "a.mp4"}, "row 2: needs one caption"),
        ({"file_path": "a.mp4", "text": ""}, "row 2: needs one caption"),
        ({"file_path": "a.mp4", "text": None}, "row 2: needs one caption"),
        ({"file_path": "a.mp4", "text": "  "}, "row 2: the caption is empty"),
        ({"file_path": "a.mp4", "text": 5}, "row 2: the caption is 5 and not text"),
        ({"file_path": "a.mp4", "caption": "x"}, "row 2: unknown column 'caption'; known are file_path"),
        ({"file_path": "b.mp4", "text": "x"}, r"row 2: no such file: .*b\.mp4"),
        ({"text": "x"}, "row 2: needs one path"),
        ({"video": "a.mp4", "image": "a.mp4", "text": "x"}, "row 2: needs one path"),
        ({"file_path": "m.json", "text": "x"}, "row 2: m.json is none of"),
        ({"file_path": "a.mp4", "text": "x", "type": "image"}, "row 2: type is 'image', but"),
        ("a.mp4", "row 2: is not an object"),
    ],
)
def test_row_errors(tmp_path, row, message):
    """Whatever is wrong with a manifest is told with the row's number, not by a KeyError or a silent default."""
    (tmp_path / "a.mp4").touch()
    (tmp_path / "m.json").write_text(json.dumps([{"file_path": "a.mp4", "text": "fine"}, row]))
    with pytest.raises(DataError, match=message):
        read_items(tmp_path / "m.json")


def test_file_errors(tmp_path):
    """Files that are no JSON, JSONL, CSV or UTF-8 at all are named with the line at fault."""
    for name, content, message in [
        ("a.json", b"{", "a.json: not JSON"),
        ("b.json", b"{}", "b.json: is not a list"),
        ("c.jsonl", b'{"file_path": 1}\n{', "c.jsonl, line 2: not JSON"),
        ("d.csv", b"video,prompt\nx.mp4\n", "d.csv, row 1: needs one caption"),
        ("e.csv", b"video,prompt\nx.mp4,a,b\n", "e.csv, row 1: unknown column"),
        ("f.csv", b"video,prompt\nx.mp4,\xff\n", "f.csv: not a UTF-8"),
        ("g.parquet", b"", "g.parquet: neither a folder nor"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            read_items(tmp_path / name)


# ---- The cache


class ToyVAE(torch.nn.Module):
    """Averages of 8x8 pixels stand in for latents: 16 channels, one frame of each four after the first."""

    spatial, temporal = 8, 4

    def __init__(self, log):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.config = SimpleNamespace(z_dim=16)
        self.log = log

    def encode(self, clip):
        self.log.append("clip")
        small = torch.nn.functional.avg_pool2d(clip[:, ::4].mean(0), 8)
        return (small * self.scale).expand(16, -1, -1, -1)


class ToyText:
    def __init__(self, log):
        self.log = log

    def __call__(self, prompts):
        self.log.extend(prompts)
        return [torch.full((1 + len(prompt), 8), float(len(prompt))) for prompt in prompts]


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    """Three videos of two clips each and an image; two of the captions are the same after cleaning."""
    folder = tmp_path_factory.mktemp("set")
    made = []
    for i, caption in enumerate(["a dog", "a  dog ", "a cat"]):
        path = write_video(folder / f"{i}.mp4", [numbered(40 * i + k, 32, 64) for k in range(20)])
        made.append(Item(path, caption, "video"))
    write_image(folder / "p.png", numbered(7, 32, 64))
    return [*made, Item(folder / "p.png", "a bird", "image")]


TOY_SPEC = ClipSpec(height=32, width=64, frames=9, clip="all")


def make_dataset(items, cache, log, **options):
    data = LatentDataset(items, TOY_SPEC, survey(items, TOY_SPEC), ToyVAE(log), ToyText(log), "text-1", cache)
    data.fill(**options)
    return data


def test_cache(items, tmp_path):
    """The cache gives what the VAE and the text encoder gave, encodes equal captions once, and is not filled twice."""
    log = []
    data = make_dataset(items, tmp_path, log)
    assert sorted(log) == ["", "a bird", "a cat", "a dog", *["clip"] * 7]
    assert len(data) == 4 and [data.variants(i) for i in range(4)] == [2, 2, 2, 1]
    assert [data.shape(i, 0) for i in range(4)] == [(16, 3, 4, 8)] * 3 + [(16, 1, 4, 8)]
    for i in range(4):
        for variant in range(data.variants(i)):
            latents = data.sample(i, variant)["latents"]
            clip = load_clip(items[i], data.probes[i], TOY_SPEC, variant)
            assert latents.shape == data.shape(i, variant) and latents.dtype == torch.float32
            assert torch.equal(latents, data.vae.encode(clip))
    assert data.text(0).shape == data.text(1).shape == (6, 8) and data.text(3)[0, 0] == 6
    assert torch.equal(data.empty_text, torch.zeros(1, 8))

    log.clear()
    again = make_dataset(items, tmp_path, log)
    assert log == [] and torch.equal(again.sample(2, 1)["latents"], data.sample(2, 1)["latents"])
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")]


def test_cache_keys(items):
    """The key changes with all that latents and text states depend on, or a run would train on stale ones."""
    found = probe(items[0], TOY_SPEC)
    clip, slower = found.variants[0], replace(TOY_SPEC, fps=Fraction(8))
    base = sample_key("file", "vae", found, TOY_SPEC, clip)
    keys = [
        sample_key("other file", "vae", found, TOY_SPEC, clip),
        sample_key("file", "other vae", found, TOY_SPEC, clip),
        *(sample_key("file", "vae", found, TOY_SPEC, replace(clip, **{name: 1})) for name in vars(clip)),
        sample_key("file", "vae", found, slower, clip),
    ]
    assert len({base, *keys}) == 8
    texts = [text_key("a dog", "e"), text_key("a cat", "e"), text_key("a dog", "f"), text_key("", "e")]
    assert len(set(texts)) == 4 and text_key(" a  dog", "e") == texts[0]

    layer = torch.nn.Linear(2, 3)
    before = fingerprint(layer)
    assert before == fingerprint(layer) != fingerprint(layer.to(torch.float64))
    with torch.no_grad():
        layer.to(torch.float32).bias[1] += 1
    assert fingerprint(layer) != before
    zeros = [{"w": torch.zeros(4, dtype=dtype)} for dtype in (torch.float16, torch.bfloat16)]
    zeros += [{"w": torch.zeros(2, 2, dtype=torch.float16)}, {"v": torch.zeros(4, dtype=torch.float16)}]
    assert len({fingerprint(SimpleNamespace(state_dict=lambda x=x: x)) for x in zeros}) == 4


def test_ranks_share_the_work(items, tmp_path):
    """Two ranks encode disjoint halves, though one begins before the other has listed what is missing; both then see
    the whole cache."""
    logs, barrier, errors = [[], []], threading.Barrier(2, timeout=60), []

    def run(rank):
        try:
            data = make_dataset(items, tmp_path, logs[rank], rank=rank, world=2, barrier=barrier.wait)
            assert all(data.sample(i, 0)["latents"].shape == data.shape(i, 0) for i in range(4))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert sorted(logs[0] + logs[1]) == ["", "a bird", "a cat", "a dog", *["clip"] * 7]
    assert abs(len(logs[0]) - len(logs[1])) <= 1


def test_cache_failures(items, tmp_path, monkeypatch):
    """A failure names the file it struck, leaves no half-written entry that a later run would read, and entries that
    another rank did not write are missed at once and not at step 1000."""

    def fail(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("cache.save_file", fail)
        with pytest.raises(RuntimeError, match="encoding .* into .* failed: .*No space left"):
            make_dataset(items, tmp_path / "full", [])
    assert not [path for path in (tmp_path / "full").rglob("*") if path.is_file()]
    broken = make_dataset(items, tmp_path / "full", [])
    broken.sample_files[0][0].write_bytes(b"half")
    with pytest.raises(RuntimeError, match="cannot be read .*; the next start makes it anew"):
        broken.sample(0, 0)
    with pytest.raises(RuntimeError, match="cache files were not written.*one folder that all ranks share"):
        make_dataset(items, tmp_path / "alone", [], rank=0, world=2)


def test_write_tensor_is_whole_or_absent(tmp_path, monkeypatch):
    """Until the file is complete nothing stands under its name, so a killed run leaves no half entry."""
    seen = []

    def watch(source, target):
        seen.append((target.exists(), source.name != target.name, source.stat().st_size > 0))

    monkeypatch.setattr("cache.os.replace", watch)
    write_tensors(tmp_path / "x.safetensors", {"x": torch.ones(3)})
    assert seen == [(False, True, True)]
