"""The site builds without a warning; in a browser every page renders, on a phone too, and no link is dead.

Skipped where mkdocs or Chromium is missing. `make test` installs mkdocs.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("material", reason="mkdocs-material is not installed")
pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed")

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE, DESKTOP = 390, 1280  # CSS pixels


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


# Opens one page after the other in a frame of each width (headless windows are never as narrow as a phone) and writes down what
# it finds. On a phone drawings scroll sideways, for their text would be too small. An element inside a box that scrolls may be
# wider than the screen.
LOOK = """<body style="margin:0"><iframe style="height:900px;border:0"></iframe><script>
const pages = PAGES, widths = WIDTHS, found = [], frame = document.querySelector("iframe");
const name = (element) => element.tagName + ": " + (element.src || element.textContent).trim().slice(0, 60);
async function look(page, width) {
  frame.style.width = width + "px";
  await new Promise((done) => { frame.onload = done; frame.src = page; });
  await new Promise((done) => setTimeout(done, 100));
  const inside = frame.contentDocument, view = frame.contentWindow, article = inside.querySelector("article");
  const cuts = (e) => ["auto", "scroll", "hidden"].includes(view.getComputedStyle(e).overflowX);
  const scrolls = (e) => e !== article && (cuts(e.parentElement) || scrolls(e.parentElement));
  const wide = [...article.querySelectorAll("*")].filter((e) => e.getBoundingClientRect().right > width + 1 && !scrolls(e));
  const broken = [...inside.images].filter((image) => !image.complete || !image.naturalWidth);
  const lines = (e) => e.getClientRects().length;
  const split = [...article.querySelectorAll("td code")].filter((e) => lines(e) > e.textContent.split(/[ /-]+/).length);
  found.push({ page, width, inner: view.innerWidth, scroll: inside.documentElement.scrollWidth,
    heading: inside.querySelector("h1")?.textContent || "", text: article.innerText.length,
    wide: wide.slice(0, 3).map(name), broken: broken.map(name), split: split.slice(0, 3).map(name),
    small: [...article.querySelectorAll("img")].filter((image) => image.getBoundingClientRect().width < 600).map(name) });
}
(async () => {
  try { for (const page of pages) for (const width of widths) await look(page, width); }
  catch (error) { found.push({ page: "", error: String(error) }); }
  const report = Object.assign(document.createElement("pre"), { id: "found", textContent: JSON.stringify(found) });
  document.body.replaceChildren(report);
})();
</script>"""


def look(site: Path, folder: Path) -> list[dict]:
    """What a browser finds on each page at the width of a phone and of a desktop."""
    driver = site / "look.html"
    paths = [path.relative_to(site).as_posix() for path in pages(site)]
    driver.write_text(
        LOOK.replace("PAGES", json.dumps(paths)).replace("WIDTHS", json.dumps([PHONE, DESKTOP])), encoding="utf-8"
    )
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]
    command += ["--allow-file-access-from-files", f"--user-data-dir={folder}", "--window-size=1400,1000"]
    command += ["--virtual-time-budget=120000", "--dump-dom", driver.as_uri()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    finally:
        driver.unlink()
    report = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert report, done.stdout[-500:] + done.stderr[-500:]
    return json.loads(html.unescape(report[1]))


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_pages_render_in_a_browser(site, tmp_path):
    """Headings and text are there, pictures load, and nothing is wider than the screen."""
    found = look(site, tmp_path)
    assert [(row["page"], row.get("error")) for row in found if "error" in row] == []
    assert len(found) == 2 * len(pages(site))
    assert {row["inner"] for row in found} == {PHONE, DESKTOP}
    assert [row["page"] for row in found if not row["heading"] or row["text"] < 200] == []
    assert [(row["page"], row["broken"]) for row in found if row["broken"]] == []
    assert [(row["page"], row["small"]) for row in found if row["small"]] == [], "drawings too small to read"
    assert [(row["page"], row["split"]) for row in found if row["split"]] == [], "names in tables broken anywhere"
    assert [(row["page"], row["width"], row["wide"]) for row in found if row["wide"] or row["scroll"] > row["width"]] == []
