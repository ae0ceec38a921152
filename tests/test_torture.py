"""Every kind of file that people have: each gives exactly the frames it should, or is dropped with its reason."""

import os
import re
import struct
import zlib
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image
from test_video import numbered, numbers

import decode
import survey
from clips import load_clip
from manifests import write_rows

H, W, N = 32, 64, 40  # of the generated files: tiny pictures that show their frame's number
STILL = 165  # the number that still pictures show: no symmetry, so each orientation reads differently
CLIPS = Path(__file__).resolve().parent.parent.parent / "shared" / "clips"
VFR = np.cumsum([25, 30, 95, 40, 62, 63, 20, 200, 30, 33] * 4).tolist()  # time stamps of N frames in milliseconds


def at(rate, n=9, total=N):
    """The frames on screen at 0, 1, ... n - 1 sixteenths of a second, of `total` at `rate` a second."""
    return [k * Fraction(rate) // 16 for k in range(n)]


# ---- Writers: each makes one file


def video(
    codec="libx264",
    rate=16,
    n=N,
    pix="yuv420p",
    size=(H, W),
    stamps=None,
    format=None,
    mux=None,
    turn=0,
    full=False,
    **o,
):
    """A writer of a video with numbered frames; stamps in milliseconds make it one of variable frame rate."""

    def write(path):
        with av.open(str(path), "w", format=format, options=mux or {}) as container:
            stream = container.add_stream(
                codec, rate=Fraction(rate), options={k.replace("_", "-"): v for k, v in o.items()}
            )
            stream.height, stream.width, stream.pix_fmt = *size, pix
            if full:
                stream.codec_context.color_range = 2
            if turn:
                stream.set_display_rotation(turn)
            if stamps:
                stream.codec_context.time_base = Fraction(1, 1000)
            for i in range(n):
                frame = av.VideoFrame.from_ndarray(numbered(i, *size), format="rgb24")
                frame = frame.reformat(format=pix, dst_color_range=2 if full else None)
                if stamps:
                    frame.pts, frame.time_base = stamps[i], Fraction(1, 1000)
                container.mux(stream.encode(frame))
            container.mux(stream.encode())

    return write


def sound(path, seconds=1.0, also=None):
    """AAC alone, or beside frames of H.264."""
    with av.open(str(path), "w") as container:
        audio = container.add_stream("aac", rate=16000)
        if also:
            stream = container.add_stream("libx264", rate=16, options=FAST)
            stream.height, stream.width, stream.pix_fmt = H, W, "yuv420p"
            for i in range(also):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(numbered(i, H, W), format="rgb24")))
            container.mux(stream.encode())
        frame = av.AudioFrame.from_ndarray(np.zeros((1, int(16000 * seconds)), np.float32), "fltp", "mono")
        frame.sample_rate = 16000
        container.mux(audio.encode(frame))
        container.mux(audio.encode())


FAST = {"preset": "ultrafast", "bf": "2"}
HEVC = "log-level=none:open-gop=1:keyint=10:min-keyint=10:bframes=4"
x264 = dict(preset="veryfast", bf="3", g="12")
x265 = dict(codec="libx265", preset="ultrafast", x265_params=HEVC)
vpx = dict(deadline="good", cpu_used="8")


def changed(writer, change):
    """A writer of what `change` makes of another one's bytes."""

    def write(path):
        writer(path)
        path.write_bytes(change(path.read_bytes()))

    return write


def cut(share):
    return lambda content: content[: int(len(content) * share)]


def avi_length(frames):
    """Puts another frame count into the headers of an AVI."""

    def change(content):
        content = bytearray(content)
        for name, place in ((b"avih", 8 + 16), (b"strh", 8 + 32)):
            where = content.index(name) + place
            content[where : where + 4] = struct.pack("<I", frames)
        return bytes(content)

    return change


def damaged(path):
    """A packet of ones in the middle, where only decoding finds it."""
    video(mux={"movflags": "faststart"}, **x264)(path)
    with av.open(str(path)) as container:
        places = [(packet.pos, packet.size) for packet in container.demux() if packet.size]
    content = bytearray(path.read_bytes())
    where, size = places[4]
    content[where : where + size] = bytes([255]) * size
    path.write_bytes(content)


def image(mode="RGB", exif=None, frames=1, deep=False, **options):
    """A writer of a still that shows STILL, in one of Pillow's modes, or of an animation that begins with it."""

    def write(path):
        pictures = [Image.fromarray(numbered(STILL + i, H, W)).convert(mode) for i in range(frames)]
        if deep:
            pictures = [Image.fromarray(numbered(STILL, H, W)[..., 0].astype(np.uint16) * 257)]
        if mode == "RGBA":  # a black picture that is transparent where it should be white
            level = Image.fromarray(255 - numbered(STILL, H, W)[..., 0])
            pictures = [Image.merge("RGBA", [Image.new("L", (W, H))] * 3 + [level])]
        if mode == "P":  # a palette whose second half is transparent over black
            shades = (numbered(STILL, H, W)[..., 0] > 128).astype(np.uint8)
            pictures = [Image.fromarray(shades, "P")]
            pictures[0].putpalette([0, 0, 0] * 2)
        more = {"save_all": True, "append_images": pictures[1:], "duration": 125} if frames > 1 else {}
        pictures[0].save(path, exif=exif or b"", **more, **options)

    return write


def turned(orientation, mark=b"", **options):
    """A writer of a still as a camera held otherwise stores it, with the Exif orientation that says so."""
    stored = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Pillow's transposition that undoes nothing but Exif's

    def write(path):
        picture = Image.fromarray(numbered(STILL, H, W))
        if orientation > 1:
            picture = picture.transpose(Image.Transpose(stored[orientation]))
        exif = Image.Exif()
        exif[0x0112] = orientation
        picture.save(path, exif=mark + exif.tobytes().removeprefix(b"Exif\0\0"), **options)

    return write


def wide_endian(path):
    """A PNG whose Exif chunk is big-endian, as cameras write it."""
    turned(6)(path)
    content = path.read_bytes()
    exif = b"MM\0*" + struct.pack(">IHHHIHHI", 8, 1, 0x0112, 3, 1, 6, 0, 0)
    where = content.index(b"eXIf") - 4
    size = struct.unpack(">I", content[where : where + 4])[0]
    chunk = struct.pack(">I", len(exif)) + b"eXIf" + exif + struct.pack(">I", zlib.crc32(b"eXIf" + exif))
    path.write_bytes(content[:where] + chunk + content[where + 12 + size :])


# ---- The table: file name, its writer, and the frame numbers of the clip or (a str) why it is dropped


VIDEOS = [
    ("h264.mp4", video(**x264), at(16)),
    ("h264.MOV", video(**x264), at(16)),
    ("h264.m4v", video(**x264), at(16)),
    ("h264.mkv", video(**x264), at(16)),
    ("h264.avi", video(**x264), at(16)),
    ("open gop.mkv", video(**x264, x264_params="open-gop=1"), at(16)),
    ("all intra.mp4", video(preset="veryfast", g="1"), at(16)),
    ("one key.mp4", video(preset="veryfast", g="999"), at(16)),
    ("refresh.mp4", video(preset="veryfast", g="12", x264_params="intra-refresh=1"), at(16)),
    ("hevc.mp4", video(**x265), at(16)),
    ("hevc.mkv", video(**x265), at(16)),
    ("hevc10.mp4", video(**x265, pix="yuv420p10le"), at(16)),
    ("vp8.webm", video("libvpx", **vpx, auto_alt_ref="1", lag_in_frames="16"), at(16)),
    ("vp9.webm", video("libvpx-vp9", **vpx, auto_alt_ref="1", lag_in_frames="16"), at(16)),
    ("live vp8.webm", video("libvpx", **vpx, mux={"live": "1"}), at(16)),
    ("live vp9.webm", video("libvpx-vp9", **vpx, mux={"live": "1"}), at(16)),
    ("live av1.mkv", video("libsvtav1", preset="12", mux={"live": "1"}), at(16)),
    ("av1.mp4", video("libsvtav1", preset="12", size=(64, 64)), at(16)),
    ("mpeg4.avi", video("mpeg4", bf="2"), at(16)),
    ("msmpeg4.avi", video("msmpeg4v2"), at(16)),
    ("mpeg2.mkv", video("mpeg2video", rate=25, bf="2"), at(25)),
    ("mjpeg.avi", video("mjpeg", pix="yuvj420p"), at(16)),
    ("raw.avi", video("rawvideo", n=12), at(16)),
    ("ffv1.mkv", video("ffv1"), at(16)),
    ("prores.mov", video("prores_ks", pix="yuv422p10le", n=12), at(16)),
    ("prores alpha.mov", video("prores_ks", pix="yuva444p10le", profile="4444", n=12), at(16)),
    ("444.mp4", video(**x264, pix="yuv444p"), at(16)),
    ("full range.mp4", video(**x264, full=True), at(16)),
    ("odd.mkv", video("ffv1", size=(H + 2, W + 4), pix="yuv444p"), at(16)),
    ("grey.mp4", video(**x264, pix="gray"), at(16)),
    ("23.976.mp4", video(**x264, rate=Fraction(24000, 1001)), at(Fraction(24000, 1001))),
    ("23.976.mkv", video(**x264, rate=Fraction(24000, 1001)), at(Fraction(24000, 1001))),
    ("24.mkv", video(**x264, rate=24), at(24)),
    ("30.avi", video(**x264, rate=30), at(30)),
    ("60.mp4", video(**x264, rate=60), at(60)),
    ("8.mp4", video(**x264, rate=8), at(8)),
    ("5.webm", video("libvpx-vp9", **vpx, rate=5), at(5)),
    ("vfr.mp4", video(**x264, stamps=VFR), "vfr"),
    ("vfr.mkv", video(**x264, stamps=VFR), "vfr"),
    ("vfr late.mkv", video(**x264, stamps=[t + 900 for t in VFR]), "vfr"),
    ("fragments.mp4", video(**x264, mux={"movflags": "frag_keyframe+empty_moov"}), at(16)),
    ("sound.mp4", lambda path: sound(path, 2.5, also=N), at(16)),
    ("long sound.mkv", lambda path: sound(path, 6, also=N), at(16)),
    ("turned 90.mp4", video(**x264, turn=90), "turned"),
    ("turned 180.mp4", video(**x264, turn=180), "turned"),
    ("turned 270.mov", video(**x264, turn=-90), "turned"),
    ("too few.avi", changed(video(**x264), avi_length(7)), at(16)),
    ("too many.avi", changed(video(**x264), avi_length(N + 1)), at(16)),
    ("really mp4.avi", changed(video(**x264, format="mp4"), bytes), at(16)),
    ("100% of %d.mp4", video(**x264), at(16)),
    ("ünï cödé 汉字.mp4", video(**x264), at(16)),
    ("a:b.mp4", video(**x264), at(16)),
    ("4 frames.mp4", video(**x264, n=4), [0]),
    ("1 frame.mp4", video(**x264, n=1), [0]),
    ("moving.gif", video("gif", rate=10, n=12, pix="rgb8"), at(10)),
    ("far too many.avi", changed(video(**x264), avi_length(900)), "cut short: it ends at"),
    ("cut.mp4", changed(video(**x264, mux={"movflags": "faststart"}), cut(0.6)), "cut short|cannot be read"),
    ("cut.webm", changed(video("libvpx-vp9", **vpx), cut(0.5)), "cut short"),
    ("cut.mkv", changed(video("ffv1"), cut(0.5)), "cut short"),
    ("no moov.mp4", changed(video(**x264), cut(0.6)), "holds no video stream|cannot be read"),
    ("damaged.mp4", damaged, "is damaged|cannot be read|Invalid data|does not decode"),
    ("empty.mp4", lambda path: path.touch(), "is empty \\(0 bytes\\)"),
    ("junk.mp4", lambda path: path.write_bytes(b"junk" * 99), "cannot be read"),
    ("text.mkv", lambda path: path.write_text("a caption"), "cannot be read"),
    ("only sound.mp4", sound, "holds no video stream"),
    ("moving.webp", video("libwebp_anim", n=5, pix="bgra"), "animated WebP"),
    ("pipe.mp4", os.mkfifo, "is no regular file"),
    ("folder.mp4", Path.mkdir, "is no regular file"),
    ("missing.mp4", lambda path: None, "no such file"),
]
IMAGES = [
    ("rgb.png", image()),
    ("rgb.JPG", image(quality=95)),
    ("rgb.jpeg", image(quality=95, subsampling=0, progressive=True)),
    ("rgb.bmp", image()),
    ("rgb.webp", image(quality=95)),
    ("lossless.webp", image(lossless=True)),
    ("still.gif", image()),
    ("grey.png", image("L")),
    ("grey.jpg", image("L", quality=95)),
    ("grey alpha.png", image("LA")),
    ("bits.png", image("1", bits=1)),
    ("deep.png", image(deep=True)),
    ("cmyk.jpg", image("CMYK", quality=95)),
    ("alpha.png", image("RGBA")),
    ("alpha.webp", image("RGBA", lossless=True)),
    ("palette.png", image("P", transparency=b"\xff\x00")),
    ("palette.gif", image("P", transparency=1)),
    *((f"exif {o}.jpg", turned(o, b"Exif\0\0", quality=95)) for o in range(1, 9)),
    *((f"exif {o}.png", turned(o)) for o in (3, 5, 6)),
    *((f"exif {o}.webp", turned(o, lossless=True)) for o in (2, 7, 8)),
    ("exif big-endian.png", wide_endian),
    ("100%d.png", image()),
]
BAD_IMAGES = [
    ("moving.png", image(frames=3), "is an animated PNG"),
    ("cut.png", changed(image(), cut(0.6)), "cut.png"),
    ("cut.jpg", changed(image(quality=95), cut(0.6)), "cut.jpg"),
    ("cut.webp", changed(image(lossless=True), cut(0.6)), "cut.webp"),
    ("empty.png", lambda path: path.touch(), "is empty"),
    ("junk.jpg", lambda path: path.write_bytes(b"\xff\xd8junk" * 9), "cannot be read|holds no"),
]
TABLE = VIDEOS + [(name, write, [STILL]) for name, write in IMAGES] + BAD_IMAGES


@pytest.fixture(scope="module")
def surveyed(tmp_path_factory):
    """The whole table as one manifest, surveyed once: (options, what was found)."""
    folder = tmp_path_factory.mktemp("torture")
    for name, write, _ in TABLE:
        write(folder / name)
    write_rows(folder / "m.jsonl", [{"file_path": name, "text": name} for name, *_ in TABLE])
    config = survey.DataOptions(
        cache=str(folder / "cache"), height=H, width=W, frames=9, fps=16, clip="start", allow_drop=True
    )
    return config, survey.survey(config, [str(folder / "m.jsonl")])


@pytest.mark.parametrize("name, expected", [(name, expected) for name, _, expected in TABLE], ids=[c[0] for c in TABLE])
def test_torture(surveyed, name, expected):
    """A file gives the very frames that a viewer sees at each sixteenth of a second, upright and with its own caption,
    or it is dropped with its reason. Anything else trains on the wrong pixels without a word."""
    config, found = surveyed
    index = next((i for i, item in enumerate(found.items) if item.caption == name), None)
    if isinstance(expected, str) and expected not in ("vfr", "turned"):
        [reason] = [
            reason for reason in found.dropped if f"{os.sep}{name}:" in reason or reason.endswith(os.sep + name)
        ]
        assert index is None and re.search(expected, reason), reason
        return
    assert index is not None, [reason for reason in found.dropped if name in reason]
    item, probe = found.items[index], found.probes[index]
    assert item.path.name == name
    if expected == "turned":
        assert (probe.height, probe.width) == ((H, W) if "180" in name else (W, H))
        return
    clip = load_clip(item, probe, survey.clip_spec(config))
    if expected == "vfr":
        expected = [max(i for i in range(N) if VFR[i] - VFR[0] <= 62.5 * k + 0.5) for k in range(9)]
    assert numbers(clip) == expected
    levels = clip[clip < 0].mean(), clip[clip > 0].mean()  # 28 and 228 of 255, black and white where those lie over it
    assert levels[0] < -0.65 and (not any(expected) or levels[1] > 0.65), levels


@pytest.mark.skipif(not CLIPS.is_dir(), reason=f"{CLIPS} is not there")
def test_real_clips(tmp_path):
    """Files of real encoders: their counts and sizes; and frames deep in them are those of decoding from the start."""
    options = dict(cache=str(tmp_path), max_area=160 * 96, frames=81, fps=16, clip="all", stride=24)
    found = survey.survey(survey.DataOptions(**options), [str(CLIPS / "metadata.json")])
    pairs = list(zip(found.items, found.probes, strict=True))
    seen = {item.path.name: (probe.width, probe.height, probe.frames, len(probe.variants)) for item, probe in pairs}
    assert seen == {
        "dog_832x480_16fps.mp4": (832, 480, 81, 1),
        "pose_576x1024_30fps.mp4": (576, 1024, 81, 1),
        "press_832x480_16fps.mp4": (832, 480, 114, 2),
        "short_832x480_29f.mp4": (832, 480, 29, 1),
        "1.png": (600, 382, 1, 1),
        "2.png": (512, 320, 1, 1),
    }
    for item, probe in pairs[:4]:
        wanted = probe.timeline.indices(range(probe.frames - 3, probe.frames), 16)
        deep = list(decode.frames(item.path, wanted, probe.timeline))
        whole = list(decode.frames(item.path, wanted, replace(probe.timeline, stamps="", keys="")))  # by counting
        assert all((a == b).all() for a, b in zip(deep, whole, strict=True)), item.path.name
