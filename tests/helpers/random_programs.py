"""Random programs around the ops, as text: a seed gives the sizes, the inputs' layout and the lines of a function.

A program grows line by line. Each is run eagerly when it is made, and dropped if it raises, so that any template may be filled
with any values: what is left is a valid program, however odd. Lines repeat earlier ones with other names and constants, since
most passes look for what is equal or nearly so.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import spec_ops

WIDTH, HEADS, KV_HEADS, DIM, QUERIES = 32, 2, 1, 8, 4
HIDDEN, VOCAB = HEADS * DIM, 24
LAYOUTS = ("own", "views", "pool")


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (HEADS, DIM))


def halves(cache: torch.Tensor) -> torch.Tensor:
    """The same cache in pages of half the size."""
    return cache.view(-1, cache.shape[1] // 2, *cache.shape[2:])


def extend(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """A ragged extend of `q [bs, n, heads, dim]`."""
    bs, n = q.shape[:2]
    indptr = torch.arange(bs + 1, dtype=torch.int32) * n
    return spec_ops.mha_extend(q.flatten(0, 1), *args, indptr, n, **options).unflatten(0, (bs, n))


SCOPE = {"torch": torch, "spec_ops": spec_ops, "heads": heads, "halves": halves, "extend": extend}


@dataclass(frozen=True)
class Program:
    """`lines` of a function of the inputs that `inputs()` makes, and the `results` that it returns.

    Attributes:
        bs, page: batch size, and tokens of a page.
        layout: the caches are inputs of their own ("own"), inputs that are views of one pool ("views"), or views that the
            program takes of its input `pool` ("pool").
        data: seed of the inputs' contents.
    """

    bs: int
    page: int
    layout: str
    data: int
    lines: tuple[str, ...]
    results: tuple[str, ...]

    def inputs(self) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(self.data)
        bs, pages = self.bs, self.bs * WIDTH // self.page

        def ints(*shape: int, low: int = 0, high: int = 9, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=g, dtype=dtype)

        def floats(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g)

        pool = floats(2, pages, self.page, KV_HEADS, DIM)
        views = pool.clone()
        caches = {
            "own": {"k": pool[0].clone(), "v": pool[1].clone()},
            "views": {"k": views[0], "v": views[1]},
            "pool": {"pool": pool},
        }[self.layout]
        place = torch.randperm(pages, generator=g).reshape(bs, -1)
        rtt = (place[:, :, None] * self.page + torch.arange(self.page)).reshape(bs, WIDTH).to(torch.int32)
        return {
            "rtt": rtt,
            "rtt2": rtt.flip(0).contiguous(),
            "req": torch.randperm(bs, generator=g),
            "base": ints(bs, low=-1 if self.data % 3 == 0 else 0),
            "other": ints(bs),
            "wide": ints(bs, dtype=torch.int64),
            "bits": ints(bs, QUERIES, high=2**40, dtype=torch.int64) | 1 << 33,
            "row": ints(bs, high=QUERIES, dtype=torch.int64),
            "keep": torch.rand(bs, generator=g) < 0.6,
            "x": floats(bs, QUERIES, HIDDEN),
            "w": floats(HIDDEN, HIDDEN) / 4,
            "head": floats(HIDDEN, VOCAB) / 4,
            "head2": floats(HIDDEN, VOCAB) / 4,
            "snap": floats(pages, self.page, KV_HEADS, DIM),
            **caches,
        }

    def function(self) -> Callable[..., Any]:
        """The program, called with the values of `inputs()`."""
        first = ["k, v = pool[0], pool[1]"] if self.layout == "pool" else []
        body = "\n".join(f"    {line}" for line in [*first, *self.lines, f"return [{', '.join(self.results)}]"])
        scope = dict(SCOPE)
        exec(f"def program({', '.join(self.inputs())}):\n{body}\n", scope)
        return scope["program"]

    def __str__(self) -> str:
        lines = "".join(f"    {line!r},\n" for line in self.lines)
        return f"Program({self.bs}, {self.page}, {self.layout!r}, {self.data}, (\n{lines}), {self.results!r})"


def sizes(line: str, bs: int, page: int) -> str:
    """`line` with the sizes of a program in place of BS, PAGE, PAGES, ..."""
    values = {"BS": bs, "PAGES": WIDTH // page, "PAGE": page, "HALF": page // 2, "Q": QUERIES, "WIDTH": WIDTH}
    values |= {"KV": KV_HEADS, "DIM": DIM}
    return re.sub(r"\b[A-Z]+\b", lambda match: str(values.get(match[0], match[0])), line)


# Templates by the kind of value that they make. `{kind}` is filled with a value of that kind, `{c}` with a small number, `{n}`
# with 1 to 4. The kinds: len and wide `[bs]` int32 and int64, pos `[bs, n]` positions, row `[bs]` rows, keep `[bs]` bool, table
# and those of constant lengths ("fixed"), page `[bs, n]` entries of a table, slot `[bs, n]`, csr, bits `[bs, 4]` masks, h
# `[bs, 4, hidden]`, logits, picked rows of them, and attention of 4 queries ("att"), masked ("tree"), of one query ("one").
TEMPLATES: dict[str, tuple[str, ...]] = {
    "len": (
        "{len} + {c}",
        "base + {c}",
        "base + {c}",
        "{c} + {len}",
        "({len}.long() + {c}).int()",
        "{wide}.int() + {c}",
        "torch.where({keep}, {len} + {c}, 0)",
        "torch.where({keep}, base + {c}, 0)",
        "{len} - {c}",
        "{len}.clamp(min=0)",
        "torch.full((BS,), {c}, dtype=torch.int32)",
        "torch.minimum({len}, other)",
        "{pos}[:, 0].int()",
        "{len} * 1",
    ),
    "wide": (
        "{len}.long()",
        "{len}.long() + {c}",
        "{wide} + {c}",
        "({wide} + {c}).int().long()",
        "{bits}[:, 0].int().long() + {c}",
    ),
    "pos": (
        "{len}[:, None]",
        "({len} - 1)[:, None]",
        "{len}[:, None] + torch.arange({n})",
        "{wide}[:, None] - torch.arange({n})",
        "{len}[:, None] + torch.arange(0, -{n}, -1)",
        "{len}[:, None] + torch.arange(0, 2 * {n}, {n})",
        "{pos} + {c}",
        "{pos}.clamp(0, 31)",
        "{pos} - {c}",
        "({len}[:, None] - torch.arange({n}).clamp(max=2)).clamp(min=0)",
    ),
    "row": ("{row}.clamp(0, 3)", "{row}.clamp(max=2)", "({len} % 4).long()", "{row}.clamp(0, row.max().item())", "3 - {row}"),
    "keep": ("~{keep}", "{len} > {c}", "~~{keep}", "{keep} & ({len} < 9)"),
    "table": (
        "spec_ops.page_table(rtt, req, {len}, PAGE)",
        "spec_ops.page_table(rtt, req, {len}, PAGE)",
        "spec_ops.page_table(rtt, req, {wide}, PAGE)",
        "spec_ops.page_table(rtt2, req, {len}, PAGE)",
        "spec_ops.page_table(rtt, req, {len}, HALF)",
        "spec_ops.page_table(rtt, req, {len}, PAGE, 5)",
        "spec_ops.page_table(rtt, req, {len}, HALF, 5)",
    ),
    "fixed": (
        "spec_ops.page_table(rtt, torch.full(({n},), 0), torch.full(({n},), 9), PAGE)",
        "spec_ops.page_table(rtt, torch.full(({n},), 0), torch.full(({n},), 8) + 1, PAGE)",
        "spec_ops.kv_indices(rtt, torch.full(({n},), 0), torch.full(({n},), 9), 40)[0]",
    ),
    "page": (
        "{table}.gather(1, ({pos} // PAGE).long())",
        "{table}.gather(1, ({pos} // PAGE).clamp(0, PAGES - 1).long())",
        "{table}[torch.arange(BS)[:, None], ({pos} // PAGE).long()]",
        "{table}[torch.arange(BS), ({len} // PAGE).clamp(min=0).long()][:, None]",
        "{table}.gather(1, ({pos} // PAGE).reshape(2, -1).long())",
        "{table}[{row}[:, None].clamp(max=BS - 1), ({pos} // PAGE).long()]",
        "{table}.gather(1, ({pos} // HALF).clamp(0, PAGES - 1).long())",
    ),
    "slot": (
        "{page} * PAGE + {pos} % PAGE",
        "rtt.gather(1, {pos}.long())",
        "rtt[req[:, None], {pos}.long()]",
        "torch.where({keep}[:, None], {slot}, -1)",
        "{slot}.long()",
        "{slot}.int().long()",
    ),
    "csr": (
        "spec_ops.kv_indices(rtt, req, {len})",
        "spec_ops.draft_kv_indices(rtt, req, {len}, {s}, 3, 1, PAGE)",
        "spec_ops.draft_kv_indices(rtt, req, {len}, {s}, 3, 2, PAGE)",
    ),
    "bits": (
        "{bits}.int().long()",
        "{bits}.int().long() + {c}",
        "({bits}.int() + {c}).long()",
        "{bits} | {c}",
        "({bits} << {c}) + {c}",
        "torch.where({keep}[:, None], {bits}.int(), 0).long() + {c}",
        "{bits} >> {c}",
        "{bits} & 15 | 8",
    ),
    "h": (
        "{h} @ w",
        "{h} @ w",
        "torch.relu({h})",
        "{h} + {h}",
        "{h} * {h}.float().pow(2).mean(-1, keepdim=True).add(1).rsqrt()",
        "{att}.flatten(2)",
        "x",
        "x",
        "{h}.double().float()",
    ),
    "logits": (
        "{h} @ head",
        "{h} @ head",
        "{h} @ head2",
        "x @ head",
        "{att}.flatten(2) @ head",
        "{logits} + 1",
        "torch.softmax({logits}, -1)",
        "{logits}[..., :11]",
        "{logits}.double()",
        "{h}.flatten(2)",
    ),
    "picked": (
        "{logits}[torch.arange(BS), {row}]",
        "{logits}[torch.arange(BS), {row}]",
        "{logits}[:, -1]",
        "{logits}[:, -1].clone()",
        "{logits}[:, 1:3]",
        "{h}[torch.arange(BS), {row}]",
        "{logits}.gather(1, {row}[:, None, None].expand(-1, 1, {logits}.shape[-1]))[:, 0]",
        "{logits}.flatten(0, 1)[torch.arange(BS) * Q + {row}.clamp(0, 3)]",
        "{logits}.flatten(0, 1)[torch.arange(BS) * Q + {row}]",
        "{logits}.gather(1, {row}[:, None, None] + {logits}[:, :1, :2].long() * 0)",
        "{logits}.float()[torch.arange(BS), {row}]",
        "{picked}.view(-1)[2:]",
        "{logits}.index_select(1, {row}[:2])",
        "{picked} @ w.T[:, :1].new_ones({picked}.shape[-1], 3)",
    ),
    "att": (
        "spec_ops.mha_target_verify(heads({h} @ w), k, v, {table}, {len}{options})",
        "spec_ops.mha_draft_extend(heads({h}), k, v, {table}, {len}{options})",
        "spec_ops.mha_draft_extend(heads({h}), halves(k), halves(v), {table}, {len})",
        "extend(heads({h}), k, v, {table}, {len}{options})",
    ),
    "product": ("{att}.flatten(2) @ head", "{att}.flatten(2) @ head2", "x @ head", "{h} @ head2"),
    "chosen": (
        "{product}[torch.arange(BS), row]",
        "{product}.flatten(0, 1)[torch.arange(BS) * Q + row.clamp(0, row.max().item())]",
    ),
    "step": (
        "TABLE.gather(1, ((base + {d} - {c})[:, None] // PAGE).clamp(0, PAGES - 1).long())",
        "TABLE.gather(1, (((base + {d} + 1)[:, None] + torch.arange(0, -{n}, -1)) // PAGE).clamp(0, PAGES - 1).long())",
        "TABLE.gather(1, (((base + {d} - 4)[:, None] + torch.arange(4)) // PAGE).clamp(0, PAGES - 1).reshape(2, -1).long())",
        "TABLE[torch.arange(BS), ((base + {d} - {c}) // PAGE).long()]",
        "spec_ops.mha_draft_decode(heads(x[:, :1]), k, v, TABLE, base + {d})",
        "spec_ops.mha_draft_decode(heads(x[:, :1]), halves(k), halves(v), TABLE, base + {d})",
    ),
    "tree": (
        "spec_ops.mha_target_verify(heads(x), k, v, {table}, {len}, tree_mask=bits.int().long() + {c}, mask_len=34)",
        "spec_ops.mha_target_verify(heads(x), k, v, {table}, {len}, tree_mask={bits}, mask_len=40)",
        "spec_ops.mha_draft_extend(heads({h}), k, v, {table}, {len}, tree_mask={bits}, mask_len=4)",
    ),
    "one": (
        "spec_ops.mha_draft_decode(heads({h}[:, :1]), k, v, {table}, {len}{options})",
        "spec_ops.mha_draft_decode(heads({h}[:, :1]), halves(k), halves(v), {table}, {len})",
        "{one} * 2",
    ),
}
# A table of the length that a template of a draft step draws once.
TABLE = "spec_ops.page_table(rtt, req, base + {d}, PAGE)"
STATEMENTS = (
    "spec_ops.append_kv(k, v, {kv}, {kv} * 2, {slot}.flatten())",
    "spec_ops.append_kv(k, v, {kv}, {kv}, {slot}.flatten())",
    "spec_ops.append_kv(k, snap, {kv}, {kv}, {slot}.flatten())",
    "snap.copy_({cache})",
    "{cache}.copy_(snap)",
    "k.mul_(2)",
    "base.add_(1)",
    "base.copy_({len})",
    "spec_ops.move_kv([k, v], {slot}.flatten(), {slot}.flatten())",
)
OPTIONS = (
    "",
    "",
    ", kv_indptr={csr}[0], kv_indices={csr}[1]",
    ", seq_lens_cpu={len}.cpu(), max_seq_len={len}.max().item()",
    ", window_left=3",
    ", max_seq_len=WIDTH",
)
# What a program returns of a value: itself, a view, a copy.
RETURNED = (
    "{0}",
    "{0}",
    "{0}[:, :3]",
    "{0}[:, :5]",
    "{0}.view(-1)[1:]",
    "{0} + 0",
    "{0}[0]",
    "{0}.t()",
    "{0}.unsqueeze(0)",
    "{0}.clone()",
)
INPUTS = {"len": ("base", "other"), "wide": ("wide",), "row": ("row",), "keep": ("keep",), "bits": ("bits",), "h": ("x",)}
WEIGHTS = {"len": 5, "wide": 1, "pos": 3, "row": 1, "keep": 1, "table": 5, "page": 4, "slot": 2, "csr": 2, "bits": 2, "h": 2,
           "logits": 3, "picked": 4, "att": 4, "one": 3, "tree": 2, "step": 3, "fixed": 1}  # fmt: skip
# What programs are about: the kinds of values to make, in order, and statements. Each program has one or two of these.
SUBJECTS: tuple[tuple[str, ...], ...] = (
    ("len", "table", "pos", "page", "len", "table", "pos", "page", "len", "table"),
    ("len", "table", "one", "len", "table", "one"),
    ("len", "table", "len", "table", "att", "one"),
    ("fixed", "fixed", "fixed"),
    ("csr", "csr", "one"),
    ("slot", "snap.copy_({cache})", "spec_ops.append_kv(k, v, {kv}, {kv} * 2, {slot}.flatten())", "page"),
    (
        "slot",
        "spec_ops.append_kv(k, v, {kv}, {kv}, {slot}.flatten())",
        "att",
        "slot",
        "spec_ops.append_kv(k, v, {kv}, {kv}, {slot}.flatten())",
        "one",
    ),
    ("step", "step", "step", "step"),
    ("bits", "bits", "tree", "bits", "tree"),
    ("table", "tree", "tree", "tree"),
    ("att", "product", "chosen", "product", "chosen", "product", "chosen", "table"),
    ("att", "logits", "logits", "picked", "picked", "logits", "picked"),
    ("h", "logits", "row", "picked", "picked", "table"),
    ("att", "h", "att", "logits", "picked"),
)
# What a program may return, most wanted first: what passes work on.
SHOWN = (
    "chosen",
    "step",
    "fixed",
    "tree",
    "picked",
    "page",
    "table",
    "csr",
    "one",
    "att",
    "slot",
    "bits",
    "logits",
    "h",
    "len",
)


class _Writer:
    """Makes one program. `scope` holds the values of the lines so far, on inputs that they mutate."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        layout = self.random.choice(LAYOUTS)
        self.program = Program(self.random.choice((1, 2, 3, 3)), self.random.choice((4, 4, 8)), layout, seed, (), ())
        self.scope: dict[str, Any] = {**SCOPE, **self.program.inputs()}
        if layout == "pool":
            self.scope |= dict(zip("kv", self.scope["pool"], strict=True))
        self.inputs = set(self.program.inputs())
        self.names: dict[str, list[str]] = {kind: list(names) for kind, names in INPUTS.items()}
        self.made: list[tuple[str, str]] = []  # templates that made a value, filled but for its constants
        self.lines: list[str] = []

    def fill(self, template: str) -> str:
        """A template with values of every kind that it names; those that are missing are made first."""

        drawn = str(self.random.choice((0, 1, 1, 2, 3, 4, 5, 6, 8, 9, 12, 20)))

        def value(match: re.Match) -> str:
            kind = match[1]
            if kind == "c":
                return str(self.random.choice((0, 1, 1, 2, 3, 4, 5, 9, 12)))
            if kind == "d":
                return drawn
            if kind == "n":
                return str(self.random.randint(1, 4))
            if kind == "s":
                return str(self.random.randint(0, 2))
            if kind == "cache":
                return self.random.choice("kv")
            if kind == "options":
                return self.fill(self.random.choice(OPTIONS))
            if kind == "kv":
                return f"{self.fill('{h}')}.flatten()[:{self.fill('{slot}')}.numel() * KV * DIM].view(-1, KV, DIM)"
            for _ in range(8):
                if self.names.get(kind) and self.random.random() < 0.9:
                    break
                self.make(kind)
            if not self.names.get(kind):
                raise LookupError(kind)
            # Mostly the latest: chains of ops are what passes follow.
            names = self.names[kind]
            return names[-1] if self.random.random() < 0.5 else self.random.choice(names)

        return re.sub(r"\{(\w+)\}", value, template.replace("TABLE", TABLE))

    def make(self, kind: str) -> None:
        """One more value of `kind`, if the template that is drawn gives a valid one."""
        if len(self.lines) > 40:
            raise LookupError(kind)
        repeated = [text for made, text in self.made if made == kind]
        text = self.random.choice(repeated) if repeated and kind != "step" and self.random.random() < 0.45 else None
        if text is None:
            text = self.fill(self.random.choice(TEMPLATES[kind]))
        elif self.random.random() < 0.5:
            text = re.sub(r"(?<=[+] )\d+", lambda _: str(self.random.choice((0, 1, 2, 5, 9))), text)
        name = f"{kind}{len(self.lines)}"
        if self.run(f"{name} = {sizes(text, self.program.bs, self.program.page)}"):
            self.names.setdefault(kind, []).append(name)
            self.made.append((kind, text))

    def run(self, line: str) -> bool:
        """Append `line` if it runs."""
        before = {name: value.clone() for name, value in self.scope.items() if isinstance(value, torch.Tensor)}
        try:
            self._check(line)
            exec(line, self.scope)
        except (IndexError, RuntimeError, TypeError, ValueError):
            for name, value in before.items():
                self.scope[name].copy_(value)
            return False
        self.lines.append(line)
        return True

    def _check(self, line: str) -> None:
        """Refuse slots of which two are equal, where the order of writing counts."""
        if line.startswith(("spec_ops.append_kv", "spec_ops.move_kv")):
            slots = eval(line.rstrip(")").rsplit(", ", 1)[1] + ")", self.scope)
            slots = slots[slots >= 0]
            if len(slots) != len(slots.unique()):
                raise ValueError("equal slots")

    def write(self) -> Program:
        kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
        plan = [step for subject in self.random.choices(SUBJECTS, k=self.random.randint(1, 2)) for step in subject]
        for _ in range(self.random.randint(0, 4)):
            step = self.random.choice(STATEMENTS) if self.random.random() < 0.3 else self.random.choices(kinds, weights)[0]
            plan.insert(self.random.randint(0, len(plan)), step)
        for step in plan:
            try:
                if step in TEMPLATES:
                    self.make(step)
                else:
                    self.run(sizes(self.fill(step), self.program.bs, self.program.page))
            except LookupError:
                continue
        return Program(
            self.program.bs, self.program.page, self.program.layout, self.program.data, tuple(self.lines), self.results()
        )

    def results(self) -> tuple[str, ...]:
        """Values of this program, or views or copies of them."""
        made = [name for kind in SHOWN for name in self.names.get(kind, []) if name not in self.inputs]
        found: list[str] = []
        for name in sorted(made[:8] + self.random.sample(made[8:], min(2, len(made[8:]))), key=lambda _: self.random.random()):
            value = f"{name}[{self.random.randint(0, 1)}]" if name.startswith("csr") else name
            for candidate in (self.random.choice(RETURNED).format(value), value):
                try:
                    eval(candidate, self.scope)
                except (IndexError, RuntimeError):
                    continue
                found.append(candidate)
                break
        return tuple(found) or ("base + 0",)


def random_program(seed: int) -> Program:
    """The program of `seed`; it changes with this file."""
    with torch.no_grad():
        return _Writer(seed).write()
