"""The site builds without a warning; in a browser every page renders, on a phone too, and no link is dead.

Skipped where mkdocs or Chromium is missing. `make test` installs mkdocs.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("material", reason="mkdocs-material is not installed")
pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed")

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE = 390  # CSS pixels


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Page(HTMLParser):
    """What a page links to, and the names that can be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.names: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.names |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in ("img", "script", "iframe") and "src" in found:
            self.loads.append(found["src"])
        if tag == "link" and found.get("rel") in ("stylesheet", "icon"):
            self.loads.append(found["href"])


def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def test_links_and_pictures_are_there(site):
    found = pages(site)
    assert len(found) > 25
    dead = []
    for path, page in found.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            name = unquote(parts.fragment)
            if not target.is_file() or (name and target in found and name not in found[target].names):
                dead.append((path.name, link))
    assert dead == []


def test_nothing_is_loaded_from_the_net(site):
    assert [load for page in pages(site).values() for load in page.loads if "//" in load] == []


def test_the_reference_has_the_public_names(site):
    import spec_ops.decoding

    text = "".join(path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html"))
    for name in ("mha_target_verify", "mla_draft_decode", "append_kv", "build_tree", *spec_ops.decoding.__all__):
        assert re.search(rf'id="[\w.]*\.{name}"', text), name


WIDTH = """<script>addEventListener("load", () => setTimeout(() => {
  const wide = [...document.querySelectorAll("article *")].filter((element) => {
    const inScroller = element.closest(".md-typeset__scrollwrap, .highlight, pre, .doc-signature, svg");
    return !inScroller && element.getBoundingClientRect().right > innerWidth + 1;
  });
  const broken = [...document.images].filter((image) => !image.complete || image.naturalWidth === 0);
  const say = (list) => list.map((e) => e.tagName + ":" + (e.src || e.textContent).slice(0, 60)).join("; ");
  document.documentElement.setAttribute("data-report", JSON.stringify({
    inner: innerWidth, scroll: document.documentElement.scrollWidth, heading: document.querySelector("h1")?.textContent || "",
    wide: say(wide.slice(0, 3)), broken: say(broken), text: document.querySelector("article").innerText.length,
  }));
}, 300));</script>"""


def in_browser(page: Path, width: int, folder: Path) -> dict:
    """What the page says of itself once it is rendered in a frame of `width`, which headless windows cannot all have."""
    import json

    probe = page.with_name(f"{page.stem}.probe.html")
    probe.write_text(page.read_text(encoding="utf-8").replace("</head>", f"{WIDTH}</head>", 1), encoding="utf-8")
    frame = page.with_name(f"{page.stem}.frame.html")
    frame.write_text(
        f"""<body style="margin:0"><iframe src="{probe.name}" style="width:{width}px;height:800px;border:0"></iframe>
<script>addEventListener("load", () => setTimeout(() => document.documentElement.setAttribute("data-report",
document.querySelector("iframe").contentDocument.documentElement.getAttribute("data-report")), 1500))</script>""",
        encoding="utf-8",
    )
    try:
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
        command += [
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-dev-shm-usage",
        ]
        command += ["--allow-file-access-from-files", f"--user-data-dir={folder / page.stem}", "--window-size=1200,900"]
        command += ["--virtual-time-budget=6000", "--dump-dom", frame.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        report = re.search(r'data-report="([^"]*)"', done.stdout)
        assert report, f"{page.name}: {done.stdout[:300]} {done.stderr[-300:]}"
        return json.loads(html.unescape(report[1]))
    finally:
        probe.unlink()
        frame.unlink()


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("width", [PHONE, 1180], ids=["phone", "desktop"])
def test_pages_render_in_a_browser(site, width, tmp_path):
    """Headings and text are there, pictures load, and nothing is wider than the screen."""
    paths = [path for path in pages(site) if path.name not in ("search.html",)]
    with ThreadPoolExecutor(2) as threads:
        reports = dict(
            zip(paths, threads.map(lambda path: in_browser(path, width, tmp_path / str(hash(path))), paths), strict=True)
        )
    for path, report in reports.items():
        told = (path.relative_to(site), report)
        assert report["inner"] == width, told
        assert report["heading"], told
        assert report["text"] > 200, told
        assert not report["broken"], told
        assert report["scroll"] <= width, told
        assert not report["wide"], told
