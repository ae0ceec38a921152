"""The survey before training and the commands check and fill: nothing is dropped without a word."""

import json
from fractions import Fraction

import pytest
from test_video import numbered, write_image, write_video

import data
import decode
import survey
from manifests import DataError, read_items, read_rows

HELD = dict(height=32, width=64, frames=9, clips=1, fps=16)


@pytest.fixture
def folder(tmp_path):
    """Three videos, a picture, a file of junk and a missing one, in a manifest in this order."""
    names = ["a.mp4", "junk.mp4", "b.mp4", "gone.mp4", "c.mp4", "p.png"]
    for i, name in enumerate(names[:5:2]):
        write_video(tmp_path / name, [numbered(i + k, 32, 64) for k in range(8 * (i + 1))])
    write_image(tmp_path / "p.png", numbered(7, 32, 64))
    (tmp_path / "junk.mp4").write_bytes(b"junk" * 50)
    rows = [{"id": i, "file_path": name, "text": f"this is {name}"} for i, name in enumerate(names)]
    (tmp_path / "m.json").write_text(json.dumps(rows))
    return tmp_path


def options(folder, **changes):
    return survey.DataOptions(**(HELD | {"cache": str(folder / "cache")} | changes))


def test_survey_stops_or_drops_aloud(folder, capsys):
    """All faults come in one message, and with the option the others go on, each with its own caption, probe and hash:
    a list that shifts by one gives every later file its neighbour's caption."""
    manifest = [str(folder / "m.json")]
    with pytest.raises(DataError) as error:
        survey.survey(options(folder), manifest)
    first, junk, gone, last = str(error.value).split("\n")
    assert first == "2 of 6 samples cannot be used:" and "junk.mp4: cannot be read" in junk
    assert f"m.json, row 4: no such file: {folder / 'gone.mp4'}" in gone and "--allow-drop" in last
    found = survey.survey(options(folder, allow_drop=True), manifest)
    assert "\n".join([first, junk, gone]) in capsys.readouterr().err
    assert [item.caption for item in found.items] == [
        f"this is {name}" for name in ("a.mp4", "b.mp4", "c.mp4", "p.png")
    ]
    assert [probe.frames for probe in found.probes] == [8, 16, 24, 1]
    assert found.digests == [decode.file_digest(item.path) for item in found.items]
    assert found.mixture.sizes == (4,) and found.notes == [f"{folder / 'm.json'}: columns not used: id"]
    (folder / "none.csv").write_text("video,prompt\njunk.mp4,x\n")
    with pytest.raises(
        DataError, match="none.csv: none of its samples can be used:\n  .*junk.mp4: cannot be read: [^\n]*$"
    ):
        survey.survey(options(folder, allow_drop=True), [*manifest, str(folder / "none.csv")])


def test_several_datasets(folder):
    """Weights and sizes are those of what is left of each dataset, or the mixture would draw items of the next one."""
    (folder / "n.csv").write_text("video,prompt\nb.mp4,x\nc.mp4,y\n")
    found = survey.survey(options(folder, allow_drop=True), [f"{folder / 'm.json'}:3", f"{folder / 'n.csv'}:0.5"])
    assert found.mixture.sizes == (4, 2) and found.mixture.weights == (3, Fraction(1, 2))
    assert [item.caption for item in found.items[4:]] == ["x", "y"]


def test_image_to_video(folder):
    """What an image-to-video model cannot learn of is refused with the reason, and pictures given for a clip's ends are
    opened like everything else."""
    rows = [{"file_path": name, "text": "x"} for name in ("a.mp4", "p.png")]
    (folder / "short.json").write_text(json.dumps([*rows, {"file_path": "s.mp4", "text": "x"}]))
    write_video(folder / "s.mp4", [numbered(k, 32, 64) for k in range(7)], 30)
    config = options(folder, model="wan2.1-i2v-14b", allow_drop=True)
    found = survey.survey(config, [str(folder / "short.json")])
    assert [item.path.name for item in found.items] == ["a.mp4"]
    assert "p.png: an image is its own first frame" in found.dropped[0]
    assert "s.mp4: too short: 7 frames at 30 fps are 3 at 16, and an image-to-video" in found.dropped[1]

    (folder / "bad.png").write_bytes(b"junk")
    ends = [{"video": "a.mp4", "prompt": str(i), "first_frame": f} for i, f in enumerate(["p.png", "bad.png", ""])]
    (folder / "ends.json").write_text(json.dumps(ends))
    found = survey.survey(config, [str(folder / "ends.json")])
    assert [item.caption for item in found.items] == ["0", "2"] and "bad.png: cannot be read" in found.dropped[0]
    a, p = (decode.file_digest(folder / name) for name in ("a.mp4", "p.png"))
    assert found.digests == [f"{a}/{p}", a]


def test_survey_is_kept(folder, monkeypatch, capsys):
    """A second start opens no file that has not changed, and gives the same; one that has changed, one of which other
    frames are needed, and a damaged record are looked at anew."""
    jobs = []
    run = survey.Decoders.run

    def counted(self, path, job, *arguments):
        jobs.append((path.name, job))
        return run(self, path, job, *arguments)

    monkeypatch.setattr(survey.Decoders, "run", counted)

    def look(**changes):
        jobs.clear()
        return survey.survey(options(folder, allow_drop=True, **changes), [str(folder / "m.json")])

    first = look()
    sound = {("a.mp4", "inspect"), ("b.mp4", "inspect"), ("c.mp4", "inspect"), ("p.png", "inspect")}
    assert set(jobs) == sound | {("junk.mp4", "inspect"), ("a.mp4", "prove"), ("b.mp4", "prove"), ("c.mp4", "prove")}
    assert look() == first and jobs == [("junk.mp4", "inspect")]  # what failed may have been mended
    look(clip="start")
    assert ("a.mp4", "inspect") not in jobs and ("c.mp4", "prove") in jobs
    write_video(folder / "b.mp4", [numbered(k, 32, 64) for k in range(30)])
    assert look().probes[1].frames == 30 and ("b.mp4", "inspect") in jobs and ("a.mp4", "inspect") not in jobs
    record = folder / "cache" / "survey.json"
    content = bytearray(record.read_bytes())
    content[len(content) // 2] ^= 1
    record.write_bytes(content)
    capsys.readouterr()
    assert len(look().items) == 4 and sound <= set(jobs)
    assert "survey.json is damaged or of another version and is made anew" in capsys.readouterr().err


def test_check(folder, capsys, monkeypatch):
    """The report says what is kept, what becomes of it, what is dropped and why, and how even the ranks will be; the
    exit code is what a script goes by."""
    monkeypatch.chdir(folder)
    words = ["--height", "32", "--width", "64", "--frames", "9", "--clips", "1", "--ranks", "2", "--batch-size", "4"]
    assert data.main(["check", "m.json", *words]) == 1
    report = capsys.readouterr().out
    for line in [
        "4 samples can be used:",
        "  b.mp4: 64x32, 16 frames at 16 fps -> 1 x 64x32x9, 24 tokens",
        "  p.png: picture of 64x32 -> 1 x 64x32x1, 8 tokens",
        "           64x32x9      2 ####",
        "2 of 6 samples cannot be used:",
        "  m.json, row 4: no such file: gone.mp4",
        "balance on 2 ranks, 4 samples a step: ranks wait ",
    ]:
        assert line in report, line
    assert decode.picture(folder / "check.png").shape[0] == 4 * 36 + 4  # a row per sample
    assert data.main(["check", "m.json", "--allow-drop", *words]) == 0
    with pytest.raises(ValueError, match="say what to do"):
        data.main(["chek", "m.json"])


def test_fill(folder, capsys):
    """Sizes and rates are added, what was there stays in its order, and a row that cannot be filled is told."""
    assert data.main(["fill", str(folder / "m.json"), "-o", str(folder / "n.csv")]) == 1
    assert "4 of 6 rows filled" in capsys.readouterr().out
    rows = [row for _, row in read_rows(folder / "n.csv")[0]]
    assert list(rows[0]) == ["id", "file_path", "text", "width", "height", "frames", "fps"] and len(rows) == 6
    assert list(rows[2].values()) == ["2", "b.mp4", "this is b.mp4", "64", "32", "16", "16"]
    assert list(rows[5].values())[3:] == ["64", "32", "1", ""] and rows[3]["width"] == ""
    with pytest.raises(ValueError, match="must lie in"):
        data.main(["fill", str(folder / "m.json"), "-o", str(folder / "cache" / "n.csv")])

    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text(name)
    for name in ("junk.mp4", "c.mp4", "p.png", "m.json", "n.csv"):
        (folder / name).unlink()
    assert data.main(["fill", str(folder)]) == 0
    assert [(item.path.name, item.caption) for item in read_items(folder / "metadata.json")] == [
        ("a.mp4", "a"),
        ("b.mp4", "b"),
    ]
    with pytest.raises(ValueError, match="metadata.json is there already; name it as --out"):
        data.main(["fill", str(folder)])
