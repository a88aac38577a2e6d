"""Pages of the site: their Python blocks run on a CPU, and what they name is there."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests.helpers.forked import run_code

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
FILE = re.compile(r"```python title=\"(\w+\.py)\"\n(.*?)```", re.DOTALL)  # a module that the page's other blocks import
WITH_CODE = [page for page in PAGES if PYTHON.search(page.read_text(encoding="utf-8"))]


def name(page: Path) -> str:
    return str(page.relative_to(DOCS))


RUN_ALL = """
import contextlib, io, json, pathlib, sys, traceback, types

from tests.helpers.inductor_unbuilt import unbuilt

failed = {}
for number, (name, program) in enumerate(json.loads(pathlib.Path("programs.json").read_text()).items()):
    page = types.ModuleType(f"page_{number}")
    sys.modules[page.__name__] = page  # where Dynamo looks up the globals of what it traces
    try:
        with contextlib.redirect_stdout(io.StringIO()), unbuilt(lowered=False):
            exec(compile(program, name, "exec"), page.__dict__)
    except BaseException:
        failed[name] = traceback.format_exc()
print(json.dumps(failed))
"""


@pytest.mark.slow
def test_blocks_run(tmp_path):
    """The blocks of a page are one program, beside the modules that the page has as files. All programs run in one process,
    since most of the time is the import of torch; what they compile is not lowered."""
    for page in WITH_CODE:
        for file, text in FILE.findall(page.read_text(encoding="utf-8")):
            (tmp_path / file).write_text(text, encoding="utf-8")
    programs = {name(page): "\n".join(PYTHON.findall(page.read_text(encoding="utf-8"))) for page in WITH_CODE}
    for package, used in (("transformers", "transformers import"), ("torchao", " quantize\n")):
        if importlib.util.find_spec(package) is None:
            programs = {page: text for page, text in programs.items() if used not in text}
    (tmp_path / "programs.json").write_text(json.dumps(programs))
    done = run_code(RUN_ALL, tmp_path, timeout=500)
    assert done.returncode == 0, done.stderr
    failed = json.loads(done.stdout.splitlines()[-1])
    assert not failed, "\n".join(f"{page}: {error}" for page, error in failed.items())


def test_the_guides_have_code():
    guides = {f"guides/{page}.md" for page in ("your-model", "transformers", "sampling", "explain", "writing-a-backend")}
    assert {"index.md", *guides} <= set(map(name, WITH_CODE))


def test_prose_is_wrapped():
    """At 128 columns, as code is; but for tables, blocks of code, and what `benchmarks.published` writes."""
    long = []
    for page in [*PAGES, *(ROOT / file for file in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"))]:
        text = re.sub(r"^ *```.*?^ *```$|<!-- figures: .*?<!-- end of figures -->", lambda block: "\n" * block[0].count("\n"),
                      page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)  # fmt: skip
        lines = enumerate(text.splitlines(), 1)
        long += [f"{page.relative_to(ROOT)}:{n}" for n, line in lines if len(line) > 128 and not line.lstrip().startswith("|")]
    assert long == []


def test_pages_of_names_say_where_their_text_is():
    """The pages of the reference are filled in when the site is built; whoever reads their source is told so, nobody else."""
    stubs = [page for page in PAGES if re.search("^::: ", page.read_text(encoding="utf-8"), re.MULTILINE)]
    assert len(stubs) >= 6
    for page in stubs:
        note = re.search(r'<div class="on-github" markdown>\n\n(.*?)\n\n</div>', page.read_text(encoding="utf-8"), re.DOTALL)
        assert note is not None, name(page)
        assert f"`site/reference/{page.stem}.html`" in note[1]
        assert "../testing.md#the-site" in note[1]
    assert ".on-github { display: none; }" in (DOCS / "style.css").read_text(encoding="utf-8")


def test_named_files_are_there():
    """`spec_ops/...`, `benchmarks/...`, `tests/...`, `examples/...` in backticks."""
    place = re.compile(r"`((?:spec_ops|benchmarks|tests|examples|docs)/[\w./*-]+)`")
    missing = [
        (name(page), found)
        for page in PAGES
        if page.name != "changelog.md"
        for found in place.findall(page.read_text(encoding="utf-8"))
        if not list(ROOT.glob(found.rstrip("/")))
    ]
    assert missing == []


def test_named_tests_are_there():
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = {found for page in PAGES for found in re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8"))}
    assert len(named) > 8
    assert [found for found in sorted(named) if f"def {found}(" not in sources] == []


def test_every_pass_is_explained():
    import spec_ops

    text = (DOCS / "concepts" / "passes.md").read_text(encoding="utf-8")
    assert re.findall(r"^### `(\w+)`", text, re.MULTILINE) == list(spec_ops.passes.pass_names())


def test_every_setting_of_generate_is_in_the_table():
    pytest.importorskip("transformers")
    from spec_ops.integrations.transformers import settings

    text = (DOCS / "guides" / "transformers.md").read_text(encoding="utf-8")
    known = {*settings.HONOURED, *settings.WITHOUT_EFFECT, *settings.REFUSED}
    known |= settings.REFUSED_IN_OUTPUT.keys()
    assert sorted(setting for setting in known if f"`{setting}`" not in text) == []


# That speculation changes no greedy text. Rounding decides near ties in 16 bits.
PROMISE = re.compile(r"(text|tokens) of plain decoding|(the same as|equals) (with )?plain|what plain decoding .*would give")
HOLDS = re.compile(r"float32|bf16|bfloat16|near tie")


def test_a_promise_of_equal_text_says_where_it_holds():
    promises = []
    for page in [ROOT / "README.md", *(page for page in PAGES if "notebook" not in page.parts)]:
        prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        paragraphs = (" ".join(part.split()) for part in re.split(r"\n\n|\n(?=\d+\. )", prose))
        promises += [(page.name, paragraph) for paragraph in paragraphs if PROMISE.search(paragraph)]
    assert len(promises) > 3
    assert [(page, paragraph) for page, paragraph in promises if not HOLDS.search(paragraph)] == []


def test_a_term_is_explained_once():
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^\*\*(.+?)\*\*$", text, re.MULTILINE)
    assert len(terms) == len(set(terms)) >= 40
    assert len(re.findall(r"^: ", text, re.MULTILINE)) == len(terms)


def test_pictures_hold_no_links_to_the_net():
    for picture in (DOCS / "images").glob("concept-*.svg"):
        text = picture.read_text(encoding="utf-8")
        assert "<title>" in text
        assert set(re.findall(r"https?://[^\"<]+", text)) == {"http://www.w3.org/2000/svg"}


@pytest.mark.slow
def test_the_drawing_of_the_passes_has_the_counts_of_explain():
    import torch

    import spec_ops
    from examples.naive_round import make_round

    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        report = spec_ops.explain(make_round(), arch="sm90")
    words = {
        "page tables?": "page tables",
        "kv-index generations": "kv-index generations",
        "copies to the host": "device-to-host copies",
        "waits": "item calls",
        "CUDA graphs?": "CUDA graphs",
        "rows of LM head in the extend": "LM-head rows in extend",
    }
    drawing = (DOCS / "images" / "concept-passes.svg").read_text(encoding="utf-8")
    for word, row in words.items():
        drawn = [int(number) for number in re.findall(rf"(\d+) {word}(?= ·|<)", drawing)]
        assert drawn == [report.before[row], report.after[row]], row


def test_every_example_and_command_is_in_its_table():
    from spec_ops.cli import app

    start = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(examples/\w+\.py)` \|", start, re.MULTILINE)
    assert sorted(listed) == sorted(f"examples/{path.name}" for path in (ROOT / "examples").glob("[a-z]*.py"))
    commands = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", commands, re.MULTILINE) == [
        command.callback.__name__ for command in app.registered_commands
    ]
