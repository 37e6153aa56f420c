"""Read the records of a request trace from JSON lines, or from one JSON array, without holding the file.

An array is cut into its elements by their brackets alone; each element then goes through msgspec, which
checks it in full, so a wrong cut cannot pass unseen.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..errors import TraceError

BOM = b"\xef\xbb\xbf"
BLOCK_BYTES = 1 << 20

MAX_RECORD_BYTES = 64 << 20
"""The longest record, which is held in memory: 64 MiB, far beyond any conversation."""

Record = dict[str, msgspec.Raw]

_SPACE = b" \t\r\n"
_MARK = re.compile(rb'["{}\[\]]')
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)  # possessive: no stack, however long
_NOT_SPACE = re.compile(rb"[^ \t\r\n]")


def json_lines(path: Path, text: io.BufferedReader) -> Iterator[Record]:
    """One record a line; empty lines do not count. Raises TraceError naming the row."""
    row = 0
    first = True
    while line := text.readline(MAX_RECORD_BYTES + 1):
        if len(line) > MAX_RECORD_BYTES:
            raise _too_long(path, row + 1)
        plain = (line.removeprefix(BOM) if first else line).strip()
        first = False
        if plain:
            row += 1
            yield _decode(path, row, plain, "Write one JSON object per line.")


def json_array(path: Path, text: io.BufferedReader) -> Iterator[Record]:
    """The elements of an array that is the whole file. Raises TraceError naming the row, counted from 1."""
    window = _Window(path, text)
    window.at = len(BOM) if window.buffer.startswith(BOM) else 0
    window.expect(b"[")
    row = 0
    while True:
        mark = window.peek(row)
        if mark == b"]" and row == 0:
            break
        if mark != b"{":
            shown = bytes(window.buffer[window.at : window.at + 60]).decode("utf-8", "backslashreplace")
            raise TraceError(
                path,
                f"not a JSON object ({shown!r}).",
                place=f"row {row + 1}",
                remedy="Write an array of JSON objects.",
            )
        row += 1
        yield _decode(path, row, window.take_object(row), "Write an array of JSON objects.")
        if window.peek(row) == b"]":
            break
        window.expect(b",", row)
    window.expect(b"]", row)
    window.expect_end(row)


def _decode(path: Path, row: int, plain: bytes, remedy: str) -> Record:
    try:
        return _RECORD.decode(plain)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        kind = "not a JSON object" if isinstance(error, msgspec.ValidationError) else "not valid JSON"
        raise TraceError(
            path,
            f"{kind} ({plain[:60].decode('utf-8', 'backslashreplace')!r}: {error}).",
            place=f"row {row}",
            remedy=remedy,
        ) from None


_RECORD = msgspec.json.Decoder(Record)


def _too_long(path: Path, row: int) -> TraceError:
    return TraceError(
        path,
        f"a record of more than {MAX_RECORD_BYTES >> 20} MiB.",
        place=f"row {row}",
        remedy="Remove or split it.",
    )


@dataclass
class _Window:
    """The part of the file in memory: `buffer`, of which everything before `at` has been used."""

    path: Path
    text: io.BufferedReader

    def __post_init__(self) -> None:
        self.buffer = self.text.read(BLOCK_BYTES)
        self.at = 0

    def peek(self, row: int) -> bytes:
        """The next byte that is no space. Raises TraceError at the end of the file."""
        while True:
            found = _NOT_SPACE.search(self.buffer, self.at)
            if found:
                self.at = found.start()
                return self.buffer[self.at : self.at + 1]
            self.at = len(self.buffer)
            if not self._more():
                raise self._truncated(row)

    def expect(self, mark: bytes, row: int = 0) -> None:
        """Step over `mark`."""
        found = self.peek(row)
        if found != mark:
            raise TraceError(
                self.path,
                f"{found.decode('latin-1')!r} where {mark.decode()!r} belongs.",
                place=f"after row {row}" if row else "before row 1",
                remedy="Write an array of JSON objects, with a comma between two of them.",
            )
        self.at += 1

    def expect_end(self, row: int) -> None:
        """Nothing but spaces may follow the array."""
        while True:
            rest = self.buffer[self.at :].strip(_SPACE)
            if rest:
                shown = rest[:60].decode("utf-8", "backslashreplace")
                raise TraceError(
                    self.path,
                    f"the file goes on after the end of its array ({shown!r}).",
                    place=f"after row {row}",
                    remedy="Write one array, or one JSON object per line.",
                )
            self.at = len(self.buffer)
            if not self._more():
                return

    def take_object(self, row: int) -> bytes:
        """The object that begins at `at`, to its closing bracket."""
        depth = 0
        scan = self.at
        while True:
            scan, depth, whole = self._walk(scan, depth)
            if whole:
                piece = self.buffer[self.at : scan]
                self.at = scan
                return piece
            if len(self.buffer) - self.at > MAX_RECORD_BYTES:
                raise _too_long(self.path, row)
            scan -= self.at
            if not self._more():
                raise self._truncated(row - 1)

    def _walk(self, scan: int, depth: int) -> tuple[int, int, bool]:
        """Follow the brackets from `scan` on: where it stopped, how deep, and whether the object is whole.

        It stops at a string that the buffer does not hold to its end.
        """
        buffer = self.buffer
        while found := _MARK.search(buffer, scan):
            scan = found.start()
            mark = buffer[scan]
            if mark == 0x22:
                string = _STRING.match(buffer, scan)
                if string is None:
                    return scan, depth, False
                scan = string.end()
                continue
            scan += 1
            depth += 1 if mark in b"{[" else -1
            if depth == 0:
                return scan, depth, True
        return len(buffer), depth, False

    def _more(self) -> bool:
        """Drop what was used and read on; the buffer then begins at what was `at`."""
        # As much again as is held: a long string is walked over a few times, not once for each block.
        block = self.text.read(max(BLOCK_BYTES, len(self.buffer) - self.at))
        self.buffer = self.buffer[self.at :] + block
        self.at = 0
        return bool(block)

    def _truncated(self, rows: int) -> TraceError:
        return TraceError(
            self.path,
            f"the JSON array ends without its closing bracket, after {rows} whole elements.",
            place=f"row {rows + 1}",
            remedy="Fetch the file again.",
        )
