"""Source of a serving engine, made of the symbols that a plug-in looks up in it."""

from __future__ import annotations

from pathlib import Path

from spec_ops.integrations.engine_symbols import Symbol


def write_source(folder: Path, table: tuple[Symbol, ...], without: Symbol | None = None, renamed: str | None = None) -> Path:
    """Source that has the symbols of `table`, less one, or with one of its names spelled otherwise."""
    files: dict[str, dict[str, list[Symbol]]] = {}
    for symbol in table:
        files.setdefault(symbol.file, {})
        if symbol != without:
            files[symbol.file].setdefault(symbol.path.split(".")[0], []).append(symbol)
    for file, owners in files.items():
        lines: list[str] = []
        for owner, found in owners.items():
            spelled = {s: [n + "_" if s == without and n == renamed else n for n in s.names] for s in found}
            if all("." not in s.path for s in found) and owner[0].islower():
                lines.append(f"def {owner}({', '.join(spelled[found[0]])}): ...")
                continue
            lines.append(f"class {owner}:\n    known: int = 0")
            for s in found:
                if "." in s.path:
                    lines.append(f"    def {s.path.split('.')[1]}({', '.join(['self', *spelled[s]])}): ...")
                else:
                    lines += [f"    {name} = 0" for name in spelled[s]]
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines))
    return folder
