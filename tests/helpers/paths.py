"""Where things of the checkout are."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES, DOCS, RESULTS = ROOT / "examples", ROOT / "docs", ROOT / "benchmarks" / "results"
