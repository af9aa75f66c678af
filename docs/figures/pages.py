"""What scripts write into pages, between two marks."""

import sys
from collections.abc import Iterable
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # for simulate, which reads what it wrote


def with_lines(page: Path, script: str, lines: Iterable[str]) -> str:
    """Return a page with other lines between the marks of a script, the path of its file."""
    start, end = f"<!-- written by docs/figures/{Path(script).name} -->\n", "<!-- end of what is written -->"
    before, _, rest = page.read_text().partition(start)
    return before + start + "\n" + "\n".join(lines).rstrip("\n") + "\n\n" + end + rest.partition(end)[2]
