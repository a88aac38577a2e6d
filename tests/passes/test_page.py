"""The page of a report: it needs nothing from elsewhere, holds every rewrite and refusal, and shows source as text."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
import torch
from typer.testing import CliRunner

import spec_ops
from spec_ops.cli import app
from spec_ops.passes import GraphReport, Note, PassResult, explain
from spec_ops.passes.history import Form, History, Record
from spec_ops.passes.report import Place
from spec_ops.passes.wording import source_text
from tests.helpers.pass_harness import using_provider
from tests.passes.test_report import LENS, Q, two_steps

VOID = {"meta", "br"}


class Page(HTMLParser):
    """The text of each element of interest; every tag must be closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for tag, _ in self.open:
            self.texts[tag][-1] += data


@pytest.fixture(autouse=True)
def scalars_in_the_graph():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        yield


def refused(q, lens):
    """The longest length stays a number that the host reads: it is returned."""
    longest = lens.max().item()
    return two_steps(q * longest, lens), longest


def test_nothing_comes_from_elsewhere():
    text = explain(refused, Q.bfloat16(), LENS, arch=90).to_html()
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "a", "form"} & {tag for tag, _ in page.tags}
    assert not [(tag, attrs) for tag, attrs in page.tags if {"src", "href", "srcset", "data", "onclick"} & attrs.keys()]
    (style,) = page.texts["style"]
    assert "url(" not in style
    assert "@import" not in style
    assert "http://" not in text
    assert "https://" not in text
    assert (
        "meta",
        {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"},
    ) in page.tags


def test_every_rewrite_and_refusal_is_there_with_its_line():
    plan = explain(refused, Q.bfloat16(), LENS, arch=90)
    items = Page(plan.to_html()).texts["li"]
    assert any(result.refused for result in plan.results)
    notes = [note for result in plan.results for note in (*result.done, *result.refused)]
    assert len(notes) > 5
    for note in notes:
        source = source_text(note.where)
        assert source or note.where == "unknown source:0"
        assert any(item.startswith(note.text) and source in item for item in items), note


def test_the_graph_before_and_after():
    plan = explain(two_steps, Q.bfloat16(), LENS, arch=90)
    page = Page(plan.to_html())
    summaries = page.texts["summary"]
    (copy,) = (text for text in summaries if "seq_lens_cpu=lens.cpu()" in text)
    assert "elide_unread_inputs" in copy
    removed = page.texts["del"]
    assert sum("aten._local_scalar_dense" in text for text in removed) == plan.before["item calls"]
    rows = [row for row in page.texts["tr"] if "mha_draft_decode.default" in row]
    assert len(rows) == 2
    assert all("other inputs by select_backends" in row and "other inputs by elide_unread_inputs" in row for row in rows)
    assert plan.verdict() in page.texts["title"]


def test_source_lines_and_reasons_are_text(tmp_path):
    """`<`, `&` and quotes in the user's source, in reasons and in arguments."""
    file = tmp_path / "a<b>.py"
    file.write_text('if x < 3 and y > \'"\': z = "<script>alert(1)</script>" & w\n')
    where = f"{file}:1"
    result = PassResult("p<1>", 1, [Note("op: <b>bold</b> & more", where)], [Note("op: a < b", where)], about="<i>does</i>")
    history = History(torch.fx.Graph())
    history.records = [Record("mul<1>", where, "int64[2]", Form("aten.<mul>", "x, '<u>'"), None, [("p<1>", "removed")])]
    report = GraphReport({"calls": 1}, {"calls": 0}, [result], Place(90, ("bf16",)), history)
    page = Page(report.to_html())
    assert not {"b", "i", "u", "script"} & {tag for tag, _ in page.tags}
    source = file.read_text().strip()
    assert any("op: <b>bold</b> & more" in item and source in item for item in page.texts["li"])
    assert any("op: a < b" in item for item in page.texts["li"])
    assert any(source in summary and "a<b>.py:1" in summary for summary in page.texts["summary"])
    assert "mul<1> = aten.<mul>(x, '<u>') int64[2]" in page.texts["del"]


def test_a_pass_that_calls_a_kernel_of_the_host():
    with using_provider(host_plan=True):
        plan = explain(lambda q: spec_ops.mha_draft_decode(q, q, q, LENS[:, None], LENS, backend="provider"), Q, arch=90)
    assert plan.host_plan_cost() in Page(plan.to_html()).texts["p"]


def test_hundreds_of_nodes_stay_folded():
    def deep(q, lens):
        for _ in range(250):
            q = q.cos().sin()
        return two_steps(q, lens)

    plan = explain(deep, Q.bfloat16(), LENS, arch=90)
    text = plan.to_html()
    page = Page(text)
    assert len(plan.history.records) > 500
    assert not any("open" in attrs for tag, attrs in page.tags if tag == "details")
    assert len(page.texts["summary"]) < 40
    assert len(text) < 500_000


def test_a_report_without_a_history_has_no_graph():
    page = Page(GraphReport({"calls": 1}, {"calls": 1}, [], Place(None, ("fp32",))).to_html())
    assert not any("The graph" in text for text in page.texts["h2"])


def test_the_command_writes_the_page(tmp_path):
    module = tmp_path / "mine.py"
    module.write_text(
        "from tests.passes.test_report import two_steps, Q, LENS\ndef make(): return two_steps, Q.bfloat16(), LENS\n"
    )
    target = tmp_path / "new" / "plan.html"
    result = CliRunner().invoke(
        app, ["explain", f"{module}:make", "--arch", "sm90", "--html", str(target)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    assert f"wrote {target}" in result.output
    assert "Plan for sm_90" in Page(target.read_text(encoding="utf-8")).texts["h1"][0]
    wrong = CliRunner().invoke(app, ["explain", f"{module}:make", "--html", str(tmp_path)])
    assert (wrong.exit_code, "--html" in wrong.output, "must be a file, got the folder" in wrong.output) == (2, True, True)
