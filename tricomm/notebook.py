"""The HTML form of results in a notebook."""

from __future__ import annotations

import html


def preformatted(self: object) -> str:
    """`str(self)` as HTML, in the notebook's colours: the `_repr_html_` of a class."""
    return f'<pre style="white-space: pre-wrap">{html.escape(str(self))}</pre>'
