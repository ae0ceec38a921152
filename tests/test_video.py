"""Video files: which frames come back, sizes and colours, unreadable files; and the files that are written."""

from fractions import Fraction

import av
import numpy as np
import pytest
import torch

import video
from clips import ClipSpec, Variant, load_clip, probe, probe_all
from manifests import DataError, Item
from video import contact_sheet, write_mp4

FAST = {
    "libx264": {"preset": "veryfast", "bf": "3"},
    "libx265": {"preset": "veryfast", "x265-params": "log-level=none:open-gop=1:keyint=20:min-keyint=20:bframes=4"},
    "libvpx-vp9": {"deadline": "realtime", "cpu-used": "8"},
    "libsvtav1": {"preset": "10", "crf": "10"},
}


def numbered(i, height=96, width=128):
    """A picture that shows the number i as eight black or white fields, lowest bit at the top left."""
    bits = np.array([(i >> b) & 1 for b in range(8)], np.uint8).reshape(2, 4)
    fields = np.kron(bits, np.ones((height // 2, width // 4), np.uint8))
    return np.repeat(fields[..., None] * 200 + 28, 3, axis=2)


def numbers(clip):
    """The numbers that the frames of a (3, T, H, W) clip show."""
    _, T, H, W = clip.shape
    fields = clip.mean(0).reshape(T, 2, H // 2, 4, W // 4).mean((2, 4)).reshape(T, 8) > 0
    return (fields * 2 ** torch.arange(8)).sum(1).tolist()


def write_video(path, frames, rate=16, codec="libx264", rotation=0, faststart=False):
    options = {"movflags": "faststart"} if faststart else {}
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream(codec, rate=Fraction(rate), options=FAST[codec])
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        if rotation:
            stream.set_display_rotation(rotation)
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return path


def write_image(path, pixels, format="rgb24", codec="png", stored=None):
    height, width = pixels.shape[:2]
    encoder = av.CodecContext.create(codec, "w")
    encoder.width, encoder.height, encoder.pix_fmt, encoder.time_base = width, height, stored or format, Fraction(1)
    frame = av.VideoFrame.from_ndarray(pixels, format=format).reformat(format=encoder.pix_fmt)
    path.write_bytes(b"".join(map(bytes, encoder.encode(frame) + encoder.encode(None))))
    return path


SPEC = ClipSpec(height=96, width=128, frames=81)


@pytest.mark.parametrize(
    "name, codec",
    [("a.mp4", "libx265"), ("a.webm", "libvpx-vp9"), ("a.mkv", "libsvtav1"), ("a.avi", "libx264")],
)
def test_codecs(tmp_path, name, codec):
    """Every codec and container gives the very frames asked for, deep in the file too. HEVC with open groups of
    pictures and AVI are those where decoders that seek come back with other frames."""
    path = write_video(tmp_path / name, [numbered(i) for i in range(65)], 16, codec)
    item, spec = Item(path, "", "video"), ClipSpec(height=96, width=128, frames=17, clip="all", stride=24)
    found = probe(item, spec)
    assert found.frames == 65 and [(v.start, v.length) for v in found.variants] == [(0, 17), (24, 17), (48, 17)]
    for variant, start in enumerate((0, 24, 48)):
        assert numbers(load_clip(item, found, spec, variant)) == list(range(start, start + 17))


def test_rotation(tmp_path):
    """A phone's sideways video comes out upright: 96x128 becomes 128x96, its left edge at the bottom."""
    frames = [np.zeros((96, 128, 3), np.uint8)] * 5
    for frame in frames:
        frame[:, :64] = 255
    item = Item(write_video(tmp_path / "a.mp4", frames, rotation=90), "", "video")
    spec = ClipSpec(max_area=96 * 128)
    found = probe(item, spec)
    assert (found.height, found.width, found.variants) == (128, 96, (Variant(0, 5, 128, 96),))
    clip = load_clip(item, found, spec)
    assert clip[:, :, 72:].min() > 0.9 and clip[:, :, :56].max() < -0.9


def test_images(tmp_path):
    """Stills: alpha lies over white, grey becomes RGB, 16 bits keep their scale, and a % in a name is no pattern."""
    grey = np.full((32, 48), 51, np.uint8)
    rgba = np.dstack([grey, grey, grey, np.where(np.arange(48) < 24, 0, 255)[None].repeat(32, 0)]).astype(np.uint8)
    spec = ClipSpec(max_area=32 * 48)
    write_image(tmp_path / "rgba0.png", np.zeros((32, 48, 3), np.uint8))
    rgb = rgba[..., :3].copy()
    for name, picture, left in [
        ("rgba%d.png", (rgba, "rgba"), 1.0),
        ("grey.png", (grey, "gray"), -0.6),
        ("deep.PNG", (grey.astype(np.uint16) * 257, "gray16be"), -0.6),
        ("b.bmp", (rgb, "rgb24", "bmp", "bgr24"), -0.6),
        ("j.jpg", (rgb, "rgb24", "mjpeg", "yuvj420p"), -0.6),
        ("w.webp", (rgba, "rgba", "libwebp", "bgra"), 1.0),
    ]:
        item = Item(write_image(tmp_path / name, *picture), "", "image")
        found = probe(item, spec)
        clip = load_clip(item, found, spec)
        assert clip.shape == (3, 1, 32, 48) and found.variants == (Variant(0, 1, 32, 48),)
        assert (clip[..., :20] - left).abs().max() < 0.02 and (clip[..., 28:] + 0.6).abs().max() < 0.02, name


def test_unreadable_files(tmp_path):
    """All files at fault are named together before any training: junk, empty, sound only, missing, cut short in the
    middle of a frame and between two, and damaged where only decoding shows it."""
    good = write_video(tmp_path / "good.mp4", [numbered(i) for i in range(49)], faststart=True)
    data = good.read_bytes()
    with av.open(str(good)) as container:
        packets = [(packet.pos, packet.size) for packet in container.demux() if packet.size]
    broken = {"junk.mp4": b"junk" * 99, "empty.mp4": b"", "between.mp4": data[: packets[20][0]], "p.png": b"\x89PNG"}
    broken["middle.mp4"] = data[: packets[20][0] + packets[20][1] // 2]
    start, size = packets[16]
    broken["damaged.mp4"] = data[:start] + bytes([255]) * size + data[start + size :]
    for name, content in broken.items():
        (tmp_path / name).write_bytes(content)
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    names = ["good.mp4", *broken, "sound.mp4", "missing.mp4"]
    items = [Item(tmp_path / name, "", "image" if name.endswith("png") else "video") for name in names]
    with pytest.raises(DataError) as error:
        probe_all(items, ClipSpec(height=96, width=128, frames=17))
    lines = str(error.value).split("\n")
    assert lines[0].startswith(f"{len(items) - 1} of the data's files") and len(lines) == len(items)
    for name, line in zip(names[1:], lines[1:], strict=True):
        assert name in line


def test_write_mp4_and_contact_sheet(tmp_path):
    """What is written reads back as it was, colours included, and the sheet has a row per video with white gaps."""
    torch.manual_seed(0)
    clip = torch.rand(3, 5, 2, 2).sub(0.5).repeat_interleave(48, 2).repeat_interleave(64, 3) * 1.6
    write_mp4(tmp_path / "a.mp4", clip, 16)
    item = Item(tmp_path / "a.mp4", "", "video")
    found = probe(item, SPEC)
    assert (found.source_fps, found.source_frames) == (16, 5)
    error = (load_clip(item, found, SPEC) - clip).abs()
    assert error.mean() < 0.02
    with pytest.raises(ValueError, match="odd edge"):
        write_mp4(tmp_path / "b.mp4", clip[..., 1:], 16)

    contact_sheet(tmp_path / "s.png", [clip, clip[:, :1, :48]], columns=3, edge=64, gap=4)
    sheet = video.decode_image(tmp_path / "s.png")
    assert sheet.shape == (4 + 48 + 4 + 24 + 4, 4 + 3 * (64 + 4), 3)
    assert (sheet[:4] == 255).all() and (sheet[52:56] == 255).all() and (sheet[56:, 72:] == 255).all()
    last = (clip[:, -1, 24, 32] + 1) * 127.5
    assert np.abs(sheet[16, 4 + 2 * 68 + 16] - last.numpy()).max() <= 1
