"""Reading PNG files of 8-bit RGB pixels with the standard library and NumPy alone (PNG specification, 3rd edition)."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from gradguess.errors import GradguessError

MAGIC = b"\x89PNG\r\n\x1a\n"
PLAIN_RGB = (8, 2, 0, 0, 0)  # bits, colour type, compression, filter method, interlacing


def read_png(data: bytes, name: str) -> np.ndarray:
    """The pixels, (height, width, 3). `name` is the file's name in errors."""
    try:
        header, packed = _chunks(data)
        width, height, *form = struct.unpack(">IIBBBBB", header)
        rows = np.frombuffer(zlib.decompress(packed), "uint8").reshape(height, 1 + 3 * width)
    except (struct.error, zlib.error, ValueError) as error:
        raise GradguessError(f"{name} is not a PNG file, or is damaged ({error}); get it again.") from error
    if tuple(form) != PLAIN_RGB:
        raise GradguessError(f"{name}: expected 8-bit RGB pixels without interlacing, found {form}; get it again.")
    pixels = np.empty((height, width, 3), "uint8")
    above = np.zeros((width, 3), "uint8")
    for row, stored in zip(pixels, rows, strict=True):
        row[:] = _unfiltered(int(stored[0]), stored[1:].reshape(width, 3), above, name)
        above = row
    return pixels


def _chunks(data: bytes) -> tuple[bytes, bytes]:
    """The header and the compressed pixels. Checksums are checked, as zlib checks its own."""
    if not data.startswith(MAGIC):
        raise ValueError("it does not begin as one")
    found: dict[bytes, list[bytes]] = {b"IHDR": [], b"IDAT": []}
    at = len(MAGIC)
    while at < len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        body = data[at + 8 : at + 8 + size]
        if struct.unpack_from(">I", data, at + 8 + size)[0] != zlib.crc32(body, zlib.crc32(kind)):
            raise ValueError("a checksum is wrong")
        if kind in found:
            found[kind].append(body)
        at += 12 + size
    return b"".join(found[b"IHDR"]), b"".join(found[b"IDAT"])


def _unfiltered(kind: int, stored: np.ndarray, above: np.ndarray, name: str) -> np.ndarray:
    """A row of pixels from what is stored: differences from the left, from above, or from both."""
    if kind == 0:
        return stored
    if kind == 1:
        return np.cumsum(stored, 0, dtype="uint8")
    if kind == 2:
        return stored + above
    if kind not in (3, 4):
        raise GradguessError(f"{name}: expected row filters from 0 to 4, found {kind}; get it again.")
    predicted = _average if kind == 3 else _paeth
    row = np.empty_like(stored)
    left, corner = np.zeros(3, "int64"), np.zeros(3, "int64")
    for i, up in enumerate(above.astype("int64")):
        row[i] = (stored[i] + predicted(left, up, corner)) % 256
        left, corner = row[i].astype("int64"), up
    return row


def _average(left: np.ndarray, up: np.ndarray, corner: np.ndarray) -> np.ndarray:
    return (left + up) // 2


def _paeth(left: np.ndarray, up: np.ndarray, corner: np.ndarray) -> np.ndarray:
    """Of the three neighbours that which is nearest to `left + up - corner`."""
    near, nearer, rest = abs(up - corner), abs(left - corner), abs(left + up - 2 * corner)
    return np.where((near <= nearer) & (near <= rest), left, np.where(nearer <= rest, up, corner))
