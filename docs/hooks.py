"""What the site's build changes in pages: links that leave docs/, which the source tree has and the site has not."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:examples|benchmarks|tests|src|backends)/[^)]*)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Files outside docs/ are named instead of linked."""
    return _OUTSIDE.sub(lambda link: f"{link[1]} (`{link[2]}` in the source tree)", markdown)
