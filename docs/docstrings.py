"""A griffe extension: docstrings as Markdown. Doctests become code blocks, Sphinx roles plain names."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`~?(?:\w+\.)*(\w+)`")
_DOCTEST = re.compile(r"(?:^[ ]*(?:>>>|\.\.\.).*\n)(?:^[ ]*\S.*(?:\n|\Z))*", re.MULTILINE)


class Markdown(griffe.Extension):
    """Rewrites every docstring before it is rendered."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _DOCTEST.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text)
