"""What picture files say in their own bytes: how they are to be turned, and whether they move.

Read here since PyAV tells of a turned picture, but not whether it is mirrored too, and to save a run-time dependency.
"""

from collections.abc import Iterator
from pathlib import Path


def exif_orientation(data: bytes) -> int:
    """The Exif orientation (1 to 8) of a JPEG, PNG or WebP file; 1, upright, where it has none."""
    exif = next((body for name, body in sections(data) if name in (b"\xe1", b"eXIf", b"EXIF")), b"")
    exif = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "little", b"MM\0*": "big"}.get(exif[:4])
    if order is None:
        return 1

    def number(at, size=2):
        return int.from_bytes(exif[at : at + size], order)

    table = number(4, 4)  # the first directory: a count, then twelve bytes per entry, whose value is at the ninth
    for entry in range(table + 2, table + 2 + 12 * number(table), 12):
        if number(entry) == 0x0112:
            return number(entry + 8)
    return 1


def sections(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields (name, content) of a JPEG's segments of the kind that Exif is kept in, a PNG's or a WebP's chunks."""
    if data[:2] == b"\xff\xd8":
        at = 2
        while data[at : at + 1] == b"\xff" and data[at + 1 : at + 2] != b"\xda":  # up to the picture itself
            size = int.from_bytes(data[at + 2 : at + 4], "big")
            body = data[at + 4 : at + 2 + size]
            if data[at + 1] != 0xE1 or body.startswith(b"Exif\0\0"):  # other segments of this number hold XMP
                yield data[at + 1 : at + 2], body
            at += 2 + max(2, size)
    elif data[:8] == b"\x89PNG\r\n\x1a\n":
        at = 8
        while at + 8 <= len(data):
            size = int.from_bytes(data[at : at + 4], "big")
            yield data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
            at += 12 + size
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        at = 12
        while at + 8 <= len(data):
            size = int.from_bytes(data[at + 4 : at + 8], "little")
            yield data[at : at + 4], data[at + 8 : at + 8 + size]
            at += 8 + size + size % 2


def animated(path: Path) -> bool:
    """Whether a GIF or WebP file has more than one picture, by its own blocks."""
    with open(path, "rb") as file:
        head = file.read(32)
        if head[:4] == b"RIFF":
            return head[12:16] == b"VP8X" and bool(head[20:21]) and bool(head[20] & 2)
        data = head + file.read()
    return gif_pictures(data) > 1


def gif_pictures(data: bytes) -> int:
    """How many pictures a GIF holds (GIF89a specification, section 20 onwards); of a damaged one, those in front."""

    def palette(flags):
        return 3 << ((flags & 7) + 1) if flags & 0x80 else 0

    if data[:3] != b"GIF" or len(data) < 13:
        return 0
    count, at = 0, 13 + palette(data[10])
    while at + 10 < len(data) and data[at] in (0x21, 0x2C):  # an extension, or a picture
        count += data[at] == 0x2C
        at += 2 if data[at] == 0x21 else 11 + palette(data[at + 9])
        while at < len(data) and data[at]:  # blocks of data, each led by its size; an empty one ends them
            at += data[at] + 1
        at += 1
    return count
