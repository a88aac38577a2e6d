"""Text of the shipped example pair: bytes as tokens, and the Python standard library as a corpus every machine already has.

The split into train and held-out files looks at file names alone, so a checkpoint trained with one Python version is evaluated
on text it has not seen under any other, also where a module moved to another directory in between.
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
        """Ids of `text`, behind a `BOS` unless `bos` is false."""
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
        """The rest: U+FFFD if the stream ended inside a character. The decoder may be used again afterwards."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _to_bytes(ids: Iterable[int]) -> bytes:
    return bytes(i for i in ids if i < ByteTokenizer.BOS)


def stdlib_files(root: str | Path | None = None) -> list[Path]:
    """`*.py` files under `root` (default: the running Python's standard library), sorted by relative path.

    Left out: installed packages, files that are not UTF-8 (lib2to3 and test have some on purpose), and
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
    """Side of a file: `heldout` for `HELD_OUT_FRACTION` of all file names, by SHA-256 of the name without its directories."""
    digest = hashlib.sha256(PurePath(path).name.encode("utf-8")).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") < HELD_OUT_FRACTION * 2**64 else "train"


def held_out_prompts(tokenizer: ByteTokenizer, count: int, length: int, root: str | Path | None = None) -> list[list[int]]:
    """`count` prompts of `length` tokens from the middle of held-out files under `root`, spread evenly over the list of files.

    Raises:
        ValueError: fewer than `count` held-out files are four times as long as a prompt.
    """
    texts = [path.read_bytes() for path in stdlib_files(root) if split_of(path) == "heldout"]
    texts = [text for text in texts if len(text) >= 4 * length]
    if len(texts) < count:
        raise ValueError(f"held_out_prompts: `count` must be at most {len(texts)}, the held-out files long enough, got {count}")
    chosen = [texts[i * len(texts) // count] for i in range(count)]
    starts = [
        text.index(b"\n", len(text) // 2 - length) + 1 if b"\n" in text[len(text) // 2 - length :] else 0 for text in chosen
    ]
    return [[tokenizer.BOS, *text[start : start + length - 1]] for text, start in zip(chosen, starts, strict=True)]
