"""A report as one HTML page: no script, no network, readable for graphs of thousands of nodes.

What belongs together is folded into `<details>`: by pass, what it did and refused; by line of the user's source, its part of
the graph before and after. A row of the graph has the color of the last pass that changed it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape

from spec_ops.passes.base import Note, PassResult
from spec_ops.passes.history import Form, Record
from spec_ops.passes.wording import Kernel, short_place, source_text

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1c1f23; background: #fff; max-width: 1500px;
  margin: 0 auto; padding: 1.5rem }
h1 { font-size: 1.35rem; margin: 0 0 .6rem } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
code, .graph td { font: 12.5px/1.4 ui-monospace, "DejaVu Sans Mono", monospace }
table { border-collapse: collapse } .counts td, .counts th { padding: .1rem .8rem; text-align: right }
.counts td:first-child { text-align: left } .counts tr.changed { font-weight: 600 } .counts tr.same { color: #6b7280 }
details { border: 1px solid #d8dce1; border-radius: 5px; margin: .35rem 0; background: #fbfbfc }
summary { cursor: pointer; padding: .35rem .7rem; overflow-wrap: anywhere }
details[open] > summary { border-bottom: 1px solid #d8dce1 }
.inside { padding: .4rem .9rem .7rem } ul { margin: .2rem 0; padding-left: 1.3rem }
li { margin: .2rem 0; overflow-wrap: anywhere }
.source { color: #374151; background: #eef0f3; border-radius: 3px; padding: 0 .3rem } .where { color: #4b5563 }
.note { color: #6b7280 } .refused::before { content: "not done: "; color: #b42318; font-weight: 600 }
.warning { color: #7a2e0e; background: #fef0c7; border-radius: 4px; padding: .3rem .6rem; margin: .3rem 0 }
.chip { display: inline-block; border-radius: 9px; padding: 0 .5rem; font-size: 12px; margin: 0 .15rem; white-space: nowrap }
.graph { width: 100%; table-layout: fixed } .graph th { text-align: left; font-weight: 600; padding: .2rem .4rem }
.graph td { vertical-align: top; padding: .12rem .4rem; overflow-wrap: anywhere; border-top: 1px solid #e7e9ec }
.graph tr.same td { color: #6b7280 } .graph del { text-decoration-thickness: 1px } .type { color: #9098a3 }
"""


def page(
    verdict: str,
    warnings: Sequence[str],
    rows: Sequence[tuple[str, int, int]],
    kernels: Sequence[Kernel],
    results: Sequence[PassResult],
    records: Sequence[Record],
) -> str:
    """The page's text. `rows`: name, count without the passes, count with them; `records`: of the graph's history, if kept."""
    colors = {result.name: f"p{place}" for place, result in enumerate(results)}
    hues = "\n".join(
        f".{name} {{ background: hsl({place * 137 % 360} 70% 89%) }}" for place, name in enumerate(colors.values())
    )
    verdict = escape(verdict)
    body = [
        f"<h1>{verdict}</h1>",
        *(f'<p class="warning">{escape(text)}</p>' for text in warnings),
        *_counts(rows),
        *_kernels(kernels),
        *_passes(results, colors),
        *_graph(records, results, colors),
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{verdict}</title>\n<style>{_STYLE}{hues}\n</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _counts(rows: Sequence[tuple[str, int, int]]) -> Iterator[str]:
    yield "<h2>Counts</h2>"
    yield '<table class="counts"><tr><th></th><th>without the passes</th><th>with them</th></tr>'
    for name, before, after in rows:
        state = "same" if before == after else "changed"
        yield f'<tr class="{state}"><td>{escape(name)}</td><td>{before}</td><td>{after}</td></tr>'
    yield "</table>"


def _kernels(kernels: Sequence[Kernel]) -> Iterator[str]:
    if kernels:
        yield "<h2>Attention kernels</h2>"
    for kernel in kernels:
        calls = ", ".join(f"{step} &times; {times}" for step, times in kernel.calls.items())
        yield f"<details><summary><b>{escape(kernel.backend)}</b>: {calls}</summary><div class='inside'><ul>"
        if kernel.missing is not None:
            yield f"<li>{escape(kernel.backend)} {escape(kernel.missing)}</li>"
        for reason, steps in kernel.others.items():
            named = f" ({', '.join(steps)})" if len(steps) < len(kernel.calls) else ""
            yield f"<li>not {escape(reason)}{escape(named)}</li>"
        yield "</ul></div></details>"


def _passes(results: Sequence[PassResult], colors: dict[str, str]) -> Iterator[str]:
    yield "<h2>What each pass did</h2>"
    for result in results:
        if not (result.done or result.refused):
            continue
        refused = f", {len(result.refused)} refused" if result.refused else ""
        chip = _chip(result.name, colors, result.name)
        told = f"{len(result.done)} done{refused} <span class='note'>{escape(result.about)}</span>"
        yield f"<details><summary>{chip} {told}</summary><div class='inside'>{_notes(result)}</div></details>"
    if idle := [result.name for result in results if not (result.done or result.refused)]:
        yield f"<p class='note'>found nothing to do: {escape(', '.join(idle))}</p>"


def _notes(result: PassResult) -> str:
    items = []
    for kind, notes in (("done", result.done), ("refused", result.refused)):
        for note, times in Counter(Note(n.text, n.where) for n in notes).items():
            items.append(_note(note, kind, times, with_place=True))
    return f"<ul>{''.join(items)}</ul>"


def _note(note: Note, kind: str, times: int, with_place: bool) -> str:
    repeated = f" <span class='note'>({times} times)</span>" if times > 1 else ""
    place = ""
    if with_place:
        source = source_text(note.where)
        line = f" <code class='source'>{escape(source)}</code>" if source else ""
        place = f"<br><span class='where'>{escape(short_place(note.where))}</span>{line}"
    return f"<li class='{kind}'>{escape(note.text)}{repeated}{place}</li>"


def _graph(records: Sequence[Record], results: Sequence[PassResult], colors: dict[str, str]) -> Iterator[str]:
    if not records:
        return
    lines: dict[str, list[Record]] = {}
    for record in records:
        lines.setdefault(record.where, []).append(record)
    before = sum(record.before is not None for record in records)
    after = sum(record.after is not None for record in records)
    yield f"<h2>The graph, by line of source: {before} calls before, {after} after</h2>"
    yield "<p class='note'>A row has the color of the last pass that changed it; gray rows are as they were.</p>"
    for where, found in lines.items():
        passes = Counter(name for record in found if not _unborn(record) for name, _ in record.passes[-1:])
        chips = "".join(_chip(name, colors, f"{name} {times}") for name, times in passes.items())
        source = source_text(where)
        shown = f"<code class='source'>{escape(source)}</code>" if source else ""
        calls = f"{sum(r.before is not None for r in found)} &rarr; {sum(r.after is not None for r in found)} calls"
        yield f"<details><summary><span class='where'>{escape(short_place(where))}</span> {shown} {calls} {chips}</summary>"
        yield "<div class='inside'>"
        notes = [
            _note(note, kind, times, with_place=False).replace("<li class", f"<li title='{escape(result.name)}' class")
            for result in results
            for kind, noted in (("done", result.done), ("refused", result.refused))
            for note, times in Counter(Note(n.text, n.where) for n in noted if n.where == where).items()
        ]
        yield f"<ul>{''.join(notes)}</ul>" if notes else ""
        yield "<table class='graph'><tr><th>before</th><th>after</th></tr>"
        yield from (_row(record, colors) for record in found if not _unborn(record))
        yield "</table></div></details>"


def _unborn(record: Record) -> bool:
    """Whether one pass made it and another removed it."""
    return record.before is None and record.after is None


def _row(record: Record, colors: dict[str, str]) -> str:
    if not record.passes:
        return f"<tr class='same'><td>{_call(record, record.before)}</td><td>{_call(record, record.after)}</td></tr>"
    name, _ = record.passes[-1]
    told = "; ".join(f"{what} by {who}" for who, what in record.passes)
    note = f"<br><span class='note'>{escape(told)}</span>"
    before = _call(record, record.before)
    if record.after is None:
        return f"<tr class='{colors[name]}'><td><del>{before}</del></td><td>{note.removeprefix('<br>')}</td></tr>"
    return f"<tr class='{colors[name]}'><td>{before}</td><td>{_call(record, record.after)}{note}</td></tr>"


def _call(record: Record, form: Form | None) -> str:
    if form is None:
        return ""
    return (
        f"{escape(record.name)} = {escape(form.target)}({escape(form.args)}) <span class='type'>{escape(record.result)}</span>"
    )


def _chip(name: str, colors: dict[str, str], text: str) -> str:
    return f"<span class='chip {colors[name]}'>{escape(text)}</span>"
