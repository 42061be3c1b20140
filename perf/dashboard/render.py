"""The page: one file with its script, its style, its data and Plotly, which loads nothing from elsewhere."""

from __future__ import annotations

import base64
import gzip
import json
import secrets
import string
from importlib.resources import files
from typing import Any

from tricomm.errors import ResourceError

_INSTALL = "the page needs Plotly: pip install 'tricomm[report]'"


def packed(data: dict[str, Any]) -> str:
    """`data` as the page's script reads it: compressed, and in characters without a meaning in HTML."""
    return base64.b64encode(gzip.compress(json.dumps(data, separators=(",", ":")).encode(), 6)).decode()


def page(data: str, renew: float = 0) -> str:
    """The page's HTML, with `packed` data. It asks its server for new data every `renew` seconds; 0: never.

    Raises `ResourceError` if Plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ResourceError(_INSTALL) from None
    parts = {
        "nonce": secrets.token_urlsafe(16),
        "connect": "'self'" if renew else "'none'",
        "renew": f"{renew:g}",
        "plotly": get_plotlyjs(),
        "data": data,
        "css": _text("page.css"),
        "charts": _text("charts.js"),
        "summary": _text("summary.js"),
        "script": _text("page.js"),
    }
    return string.Template(_text("page.html")).substitute(parts)


def _text(name: str) -> str:
    return files("tricomm").joinpath("perf/dashboard/page", name).read_text(encoding="utf-8")
