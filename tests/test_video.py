"""Video files: which frames come back, sizes and colours; and the files that are written."""

import dataclasses
from fractions import Fraction

import av
import numpy as np
import pytest
import torch

import decode
from clips import ClipSpec, Probe, Variant, load_clip, needed, probe
from manifests import DataError, Item
from video import contact_sheet, write_mp4

FAST = {
    "libx264": {"preset": "veryfast", "bf": "3"},
    "libx265": {"preset": "veryfast", "x265-params": "log-level=none:open-gop=1:keyint=20:min-keyint=20:bframes=4"},
    "libvpx-vp9": {"deadline": "realtime", "cpu-used": "8"},
    "libsvtav1": {"preset": "10", "crf": "10"},
    "libvpx": {"deadline": "realtime", "cpu-used": "8"},
    "mpeg2video": {"bf": "2"},  # open groups of pictures, whose first frames no decoder gets right behind a seek
    "mpeg4": {"bf": "0"},
    "gif": {},
    "libwebp_anim": {},
}
STORED = {"gif": "rgb8", "libwebp_anim": "bgra"}  # pixel formats; others: yuv420p


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


def number_of(picture):
    """The number that a (h, w, 3) picture shows."""
    return numbers(torch.from_numpy(picture / 127.5 - 1).permute(2, 0, 1)[:, None])[0]


def write_video(path, frames, rate=16, codec="libx264", rotation=0, faststart=False, g=None):
    options = {"movflags": "faststart"} if faststart else {}
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream(codec, rate=Fraction(rate), options=FAST[codec] | ({"g": str(g)} if g else {}))
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = stored = STORED.get(codec, "yuv420p")
        if rotation:
            stream.set_display_rotation(rotation)
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format=stored)))
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


def test_write_mp4_and_contact_sheet(tmp_path):
    """What is written reads back as it was, colours included, and the sheet has a row per video with white gaps."""
    torch.manual_seed(0)
    clip = torch.rand(3, 5, 2, 2).sub(0.5).repeat_interleave(48, 2).repeat_interleave(64, 3) * 1.6
    write_mp4(tmp_path / "a.mp4", clip, 16)
    item = Item(tmp_path / "a.mp4", "", "video")
    found = probe(item, SPEC)
    assert (found.timeline.rate, found.timeline.frames) == (16, 5)
    error = (load_clip(item, found, SPEC) - clip).abs()
    assert error.mean() < 0.02
    with pytest.raises(ValueError, match="odd edge"):
        write_mp4(tmp_path / "b.mp4", clip[..., 1:], 16)

    contact_sheet(tmp_path / "s.png", [clip, clip[:, :1, :48]], columns=3, edge=64, gap=4)
    sheet = decode.picture(tmp_path / "s.png")
    assert sheet.shape == (4 + 48 + 4 + 24 + 4, 4 + 3 * (64 + 4), 3)
    assert (sheet[:4] == 255).all() and (sheet[52:56] == 255).all() and (sheet[56:, 72:] == 255).all()
    last = (clip[:, -1, 24, 32] + 1) * 127.5
    assert np.abs(sheet[16, 4 + 2 * 68 + 16] - last.numpy()).max() <= 1


@pytest.mark.parametrize(
    "name, codec",
    [("a.mp4", "libx264"), ("a.mkv", "libx265"), ("a.webm", "libvpx-vp9"), ("b.mkv", "mpeg2video")],
)
def test_decoding_is_bounded_and_exact(tmp_path, name, codec):
    """A clip deep in a file costs no more than its own group of pictures, and is what decoding from the start gives.
    Without the first, the clips of a long file take time by its length squared; without the second, no run is right."""
    path = write_video(tmp_path / name, [numbered(i) for i in range(240)], 24, codec, g=20)
    timeline, _ = decode.scan(path)
    seen = []
    for start in (0, 19, 20, 21, 118, 239):
        wanted = range(start, min(start + 5, 240))
        decoded = []
        frames = list(decode.frames(path, wanted, timeline, alive=lambda decoded=decoded: decoded.append(1)))
        seen.append(len(decoded))
        assert [number_of(frame) for frame in frames] == list(wanted)
        from_start = decode.frames(path, wanted, dataclasses.replace(timeline, keys=""))
        assert all((a == b).all() for a, b in zip(frames, from_start, strict=True))
    assert max(seen) <= 40, seen


def test_what_a_damaged_frame_spoils(tmp_path):
    """Frames made of a damaged one are damaged too, up to the next keyframe, though decoders call them sound."""
    path = write_video(tmp_path / "a.mp4", [numbered(i) for i in range(40)], 16, "mpeg4", g=20)
    with av.open(str(path)) as container:
        packets = [(packet.pos, packet.size) for packet in container.demux() if packet.size]
    content = bytearray(path.read_bytes())
    where, size = packets[5]
    content[where + size // 2 : where + size] = bytes(i * 73 % 256 for i in range(size - size // 2))
    path.write_bytes(content)
    timeline, _ = decode.scan(path)
    for first in (0, 20):
        frames = decode.frames(path, range(first, first + 5), timeline)
        assert [number_of(frame) for frame in frames] == list(range(first, first + 5))
    for first in (5, 7, 19):
        with pytest.raises(DataError, match=f"frame {first} is damaged"):
            list(decode.frames(path, range(first, first + 5), timeline))


def test_needed():
    """Of a file, the frames of every clip are proven to decode, and of the long stretches between them none."""
    timeline = decode.Timeline(1000, Fraction(32), True, Fraction(1, 1000))
    clips = tuple(Variant(start, length, 16, 16) for start, length in [(40, 5), (0, 9), (5, 9), (14, 5), (40, 9)])
    found = Probe(timeline, 16, 16, 500, clips)
    assert needed(found, ClipSpec(height=16, width=16)) == [(0, 26), (28, 36), (80, 96)]


def test_decoders_that_lie_after_a_seek_are_not_believed(tmp_path, monkeypatch):
    """Where the frames behind a seek have other stamps than the file's, decoding begins at the start instead."""
    path = write_video(tmp_path / "a.mp4", [numbered(i) for i in range(60)], 24, g=10)
    timeline, _ = decode.scan(path)
    true_seek = decode.seek

    def seek(container, stream, stamps, keys):
        packets, number = true_seek(container, stream, stamps, keys)
        return packets, number - 1  # as if it had landed one frame earlier

    monkeypatch.setattr(decode, "seek", seek)
    assert [number_of(frame) for frame in decode.frames(path, range(40, 45), timeline)] == list(range(40, 45))


def test_timeline():
    """Rates are exact where stamps lie on a grid, rounding aside; else a frame is on screen from its own stamp on."""
    tick = Fraction(1, 1000)
    for rate in (16, 24, Fraction(24000, 1001), 60):
        stamps = np.array([round(1000 * i / Fraction(rate)) for i in range(1000)])
        assert decode.find_rate(stamps, 0, tick, [Fraction(rate)]) == (rate, True)
    stamps = np.array([0, 100, 150, 600, 640])
    rate, steady = decode.find_rate(stamps, 360, tick, [Fraction(5)])
    assert (rate, steady) == (5, False)  # five frames in a second
    timeline = decode.Timeline(5, rate, steady, tick, decode.pack(stamps + 77), decode.pack(np.array([0])))
    assert timeline.frames_at(Fraction(16)) == 16
    assert timeline.indices(range(16), Fraction(16)) == [0, 0, 1, *[2] * 7, 3, *[4] * 5]
    assert decode.unpack(decode.pack(stamps)).tolist() == stamps.tolist()
