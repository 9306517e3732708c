"""What the site's build changes in pages: links that leave docs/, which the site has not; the list of decisions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:examples|benchmarks|tests|src|backends)/[^)]*)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Files outside docs/ are named instead of linked; every decision is listed by its title."""
    if page.file.src_uri == "decisions/index.md":
        markdown += "\n" + "\n".join(_decisions(Path(page.file.abs_src_path).parent))
    return _OUTSIDE.sub(lambda link: f"{link[1]} (`{link[2]}` in the source tree)", markdown)


def _decisions(folder: Path) -> list[str]:
    pages = sorted(path for path in folder.glob("*.md") if path.name != "index.md")
    return [f"- [{page.read_text(encoding='utf-8').splitlines()[0].removeprefix('# ')}]({page.name})" for page in pages]
