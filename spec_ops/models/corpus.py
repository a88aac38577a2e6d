"""Text for the shipped pair: bytes as tokens, and the Python standard library as a corpus that every machine has.

File names alone decide which files are held out. A checkpoint that was trained with one version of Python is thus evaluated on
text that it has not seen with any other, even where a module has moved to another directory.
"""

from __future__ import annotations

import codecs
import hashlib
import sysconfig
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Literal

HELD_OUT_FRACTION = 0.05
_SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "__pycache__"}


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, then `BOS` and `EOS`. `vocab_size` is padded to a multiple of 8; the rest is never used."""

    BOS = 256
    EOS = 257
    stop_tokens = (EOS,)
    vocab_size = 264

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Ids of `text`, after a `BOS` unless `bos` is false."""
        return [self.BOS] * bos + list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`: special ids are dropped, bytes that are not UTF-8 become U+FFFD."""
        return _to_bytes(ids).decode("utf-8", errors="replace")

    def stream_decoder(self) -> StreamDecoder:
        """A decoder for ids that arrive a few at a time."""
        return StreamDecoder()


class StreamDecoder:
    """Incremental `ByteTokenizer.decode`: a character appears when its last byte arrives, never as a broken half."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete."""
        return self._decoder.decode(_to_bytes(ids))

    def finish(self) -> str:
        """What is left: U+FFFD if the stream ended inside a character. The decoder may be used again afterwards."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _to_bytes(ids: Iterable[int]) -> bytes:
    return bytes(i for i in ids if i < ByteTokenizer.BOS)


def stdlib_files(root: str | Path | None = None) -> list[Path]:
    """`*.py` files under `root` (default: the running Python's standard library), sorted by relative path.

    Installed packages are left out, and so are files that are not UTF-8 (lib2to3 and test have some on purpose) and
    `_sysconfigdata_*.py`, which records how one machine built its Python.
    """
    directory = Path(sysconfig.get_paths()["stdlib"] if root is None else root)
    if not directory.is_dir():
        raise FileNotFoundError(f"stdlib_files: no such directory: {directory}")
    relative = (path.relative_to(directory) for path in directory.rglob("*.py"))
    kept = (path for path in relative if _SKIPPED_DIRECTORIES.isdisjoint(path.parts))
    return [
        directory / path
        for path in sorted(kept, key=PurePath.as_posix)
        if not path.name.startswith("_sysconfigdata") and _is_utf8(directory / path)
    ]


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, OSError):  # OSError: a dangling link
        return False
    return True


def split_of(path: str | PurePath) -> Literal["train", "heldout"]:
    """The split of a file: `heldout` for `HELD_OUT_FRACTION` of all names, by SHA-256 of the name without folders."""
    digest = hashlib.sha256(PurePath(path).name.encode("utf-8")).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") < HELD_OUT_FRACTION * 2**64 else "train"


def held_out_texts(count: int, length: int, root: str | Path | None = None) -> list[bytes]:
    """`count` texts of `length` bytes from held-out files under `root`, spread evenly over the list of files.

    A text is the middle of a file. Where there are fewer files than texts, it is the middle of one of several equal parts of a
    file. Python 3.13 has 57 files that are long enough for a text of 256 bytes, or 16 without its tests.

    Raises:
        ValueError: the held-out files have room for fewer than `count` texts. A text needs room of four times its length.
    """
    texts = [path.read_bytes() for path in stdlib_files(root) if split_of(path) == "heldout"]
    rooms = [len(text) // (4 * length) for text in texts]
    if sum(rooms) < count:
        raise ValueError(f"held_out_texts: `count` must be at most {sum(rooms)}, the room in held-out files, got {count}")
    parts = 1
    while sum(min(room, parts) for room in rooms) < count:
        parts += 1
    places = [
        (text, len(text) * (2 * part + 1) // (2 * min(room, parts)))
        for text, room in zip(texts, rooms, strict=True)
        for part in range(min(room, parts))
    ]
    chosen = [places[i * len(places) // count] for i in range(count)]
    return [_after_a_line(text, middle, length) for text, middle in chosen]


def held_out_prompts(tokenizer: ByteTokenizer, count: int, length: int, root: str | Path | None = None) -> list[list[int]]:
    """`count` prompts of `length` tokens, `BOS` and the first bytes of `held_out_texts`. Raises a ValueError as that does."""
    return [[tokenizer.BOS, *text[: length - 1]] for text in held_out_texts(count, length, root)]


def _after_a_line(text: bytes, middle: int, length: int) -> bytes:
    """`length` bytes of `text` that begin near `middle`, after the end of a line if there is one within `length` of it."""
    start = text.find(b"\n", middle - length, middle + length) + 1 or middle - length
    return text[start : start + length]
