"""The dashboard for Grafana over the metrics of `prometheus`, to be imported there."""

from __future__ import annotations

from typing import Any

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_OURS = '{simulated=~"$simulated", collective=~"$collective"}'
_BY_KERNEL, _KERNEL = "sum by (collective, algorithm, protocol)", "{{collective}} {{algorithm}}/{{protocol}}"
_BY_SIZE, _SIZE = "by (collective, algorithm, bucket)", "{{collective}} {{algorithm}} up to {{bucket}} B"


def _rate(metric: str, labels: str = _OURS) -> str:
    return f"(rate({metric}{labels}[$__rate_interval]))"


_MEAN = " / ".join(_BY_KERNEL + " " + _rate(f"tricomm_call_seconds_{part}") for part in ("sum", "count"))
_WAITS = _rate("tricomm_peer_wait_seconds_total", '{simulated=~"$simulated"}')
_ROUTED = _rate("tricomm_routed_calls_total", "")
_PANELS = (  # title, unit, query, legend
    ("Calls per second", "ops", f"{_BY_KERNEL} {_rate('tricomm_calls_total')}", _KERNEL),
    ("Input bytes per second", "Bps", f"{_BY_KERNEL} {_rate('tricomm_bytes_total')}", _KERNEL),
    (
        "Median of the latest timed calls (slowest rank)",
        "µs",
        f"max {_BY_SIZE} (tricomm_call_p50_microseconds{_OURS})",
        _SIZE,
    ),
    (
        "99th per cent of the latest timed calls (slowest rank)",
        "µs",
        f"max {_BY_SIZE} (tricomm_call_p99_microseconds{_OURS})",
        _SIZE,
    ),
    ("Mean time of timed calls", "s", _MEAN, _KERNEL),
    ("Bus bandwidth (slowest rank)", "GBs", f"min {_BY_SIZE} (tricomm_bus_bandwidth_gbs{_OURS})", _SIZE),
    (
        "Seconds per second that ranks waited for a peer",
        "percentunit",
        f"sum by (group, peer) {_WAITS}",
        "group {{group}}, for rank {{peer}}",
    ),
    (
        "Calls per second that NCCL or Gloo ran",
        "ops",
        f"sum by (route, collective) {_ROUTED}",
        "{{route}} {{collective}}",
    ),
)
_SIMULATED = [{"text": value, "value": value, "selected": value == "false"} for value in ("false", "true")]
_VARIABLES = (
    {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
    {
        "name": "simulated",
        "type": "custom",
        "label": "Simulated",
        "query": "false,true",
        "current": _SIMULATED[0],
        "options": _SIMULATED,
    },
    {
        "name": "collective",
        "type": "query",
        "label": "Collective",
        "datasource": _SOURCE,
        "query": "label_values(tricomm_calls_total, collective)",
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    },
)


def board() -> dict[str, Any]:
    """The dashboard in Grafana's JSON model: panels of half the width, two a row."""
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": title,
            "datasource": _SOURCE,
            "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
            "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
            "targets": [{"refId": "A", "expr": query, "legendFormat": legend}],
        }
        for number, (title, unit, query, legend) in enumerate(_PANELS)
    ]
    facts = {
        "title": "tricomm",
        "uid": "tricomm",
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "tags": ["tricomm"],
    }
    shown = {"refresh": "30s", "time": {"from": "now-1h", "to": "now"}}
    return facts | shown | {"templating": {"list": list(_VARIABLES)}, "panels": panels}
