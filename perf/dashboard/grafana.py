"""The dashboard for Grafana over the metrics of `prometheus`."""

from __future__ import annotations

from typing import Any

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_OURS = '{simulated=~"$simulated", collective=~"$collective"}'
_KERNEL = "{{collective}} {{algorithm}}/{{protocol}}"
_SIZE = "{{collective}} {{algorithm}} up to {{bucket}} B"


def _rate(metric: str, by: str = "collective, algorithm, protocol", labels: str = _OURS) -> str:
    return f"sum by ({by}) (rate({metric}{labels}[$__rate_interval]))"


def _slowest(choose: str, metric: str) -> str:
    return f"{choose} by (collective, algorithm, bucket) ({metric}{_OURS})"


_P50, _P99 = (_slowest("max", f"tricomm_call_{part}_microseconds") for part in ("p50", "p99"))
_MEAN = " / ".join(_rate(f"tricomm_call_seconds_{part}") for part in ("sum", "count"))
_WAITS = _rate("tricomm_peer_wait_seconds_total", "group, peer", '{simulated=~"$simulated"}')
_ROUTED = _rate("tricomm_routed_calls_total", "route, collective", "")
_PANELS = (  # title, unit, query, legend
    ("Calls per second", "ops", _rate("tricomm_calls_total"), _KERNEL),
    ("Input bytes per second", "Bps", _rate("tricomm_bytes_total"), _KERNEL),
    ("Median of the latest timed calls (slowest rank)", "µs", _P50, _SIZE),
    ("99th per cent of the latest timed calls (slowest rank)", "µs", _P99, _SIZE),
    ("Mean time of timed calls", "s", _MEAN, _KERNEL),
    ("Bus bandwidth (slowest rank)", "GBs", _slowest("min", "tricomm_bus_bandwidth_gbs"), _SIZE),
    ("Seconds per second that ranks waited for a peer", "percentunit", _WAITS, "group {{group}}, for rank {{peer}}"),
    ("Calls per second through NCCL or over TCP", "ops", _ROUTED, "{{route}} {{collective}}"),
)
_SIMULATED = [{"text": value, "value": value, "selected": value == "false"} for value in ("false", "true")]
_BOTH = {"type": "custom", "query": "false,true", "current": _SIMULATED[0], "options": _SIMULATED}
_COLLECTIVES = {"type": "query", "query": "label_values(tricomm_calls_total, collective)", "datasource": _SOURCE}
_ALL = {"includeAll": True, "multi": True, "refresh": 2, "current": {"text": "All", "value": "$__all"}}
_VARIABLES = (
    {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
    {"name": "simulated", "label": "Simulated", **_BOTH},
    {"name": "collective", "label": "Collective", **_COLLECTIVES, **_ALL},
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
