"""What of the package's metadata depends on where the repository is published.

A build in a GitHub workflow knows the address; elsewhere `SPEC_OPS_REPOSITORY` gives it, a URL without a slash at the end. With
an address the wheel has URLs, and the long description is README.md with absolute links and images. Without one it is README.md
minus what only a checkout can show.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from setuptools import setup

_RELATIVE = r"(?!https?://|#|mailto:)"


def repository(environment: Mapping[str, str]) -> str | None:
    """The address of the repository, if the build was told one."""
    if given := environment.get("SPEC_OPS_REPOSITORY"):
        return given
    server, name = environment.get("GITHUB_SERVER_URL"), environment.get("GITHUB_REPOSITORY")
    return f"{server}/{name}" if server and name else None


def project_urls(address: str | None) -> dict[str, str]:
    """As package indexes show them (https://packaging.python.org/en/latest/specifications/well-known-project-urls/)."""
    if address is None:
        return {}
    paths = {"Source": "", "Documentation": "/blob/HEAD/docs/index.md", "Changelog": "/blob/HEAD/docs/changelog.md",
             "Issues": "/issues"}  # fmt: skip
    return {name: address + path for name, path in paths.items()}


def long_description(readme: str, address: str | None = None) -> str:
    """`readme` for a package index.

    With an `address`, relative links and images become absolute. Without one, paragraphs that are relative images go, and
    relative links become their text.
    """
    if address is not None:
        readme = re.sub(rf"(!\[[^\]]*\]\(){_RELATIVE}([^)]*\))", rf"\1{address}/raw/HEAD/\2", readme)
        readme = re.sub(rf"(<img[^>]*src=\"){_RELATIVE}", rf"\1{address}/raw/HEAD/", readme)
        return re.sub(rf"(\]\(){_RELATIVE}([^)]*\))", rf"\1{address}/blob/HEAD/\2", readme)
    images = re.compile(
        rf"^(?:\[?!\[[^\]]*\]\({_RELATIVE}[^)]*\)(?:\]\([^)]*\))?|<img[^>]*src=\"{_RELATIVE}[^>]*>)[ \t]*\n+", re.M
    )
    links = re.compile(rf"(?<!!)\[([^\]]*)\]\({_RELATIVE}[^)]*\)")
    return links.sub(r"\1", images.sub("", readme))


if __name__ == "__main__":
    address = repository(os.environ)
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(
        long_description=long_description(readme, address),
        long_description_content_type="text/markdown",
        project_urls=project_urls(address),
    )
