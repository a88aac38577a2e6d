"""The long description: README.md without what only a checkout can show, which is images and links with relative paths."""

import re
from pathlib import Path

from setuptools import setup


def long_description(readme: str) -> str:
    """`readme` without paragraphs that are relative images; relative links become their text."""
    images = re.compile(
        r"^(?:\[?!\[[^\]]*\]\((?!https?://)[^)]*\)(?:\]\([^)]*\))?|<img[^>]*src=\"(?!https?://)[^>]*>)[ \t]*\n+", re.M
    )
    links = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?://|#|mailto:)[^)]*\)")
    return links.sub(r"\1", images.sub("", readme))


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(long_description=long_description(readme), long_description_content_type="text/markdown")
