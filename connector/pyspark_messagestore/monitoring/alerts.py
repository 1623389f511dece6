"""Writes what Prometheus and Grafana need to watch stores: alert rules and a dashboard.

    python -m pyspark_messagestore.monitoring.alerts deploy

Both are made from `health.RULES` and from the metrics of `messagestore metrics`, so they name what there is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pyspark_messagestore.monitoring.health import FAULT, RULES, Rule

_HEAD = """\
# Alerts for message stores. `python -m pyspark_messagestore.monitoring.alerts deploy` writes this file.
# For rule_files of Prometheus, which gets the metrics from `messagestore metrics` or from `messagestore serve`.
"""
_PANELS = (
    ("Messages in, a second", "sum by (store, topic) (rate(rocketmq_messages_in_total[5m]))", "{{topic}}", "short"),
    ("Lag of consumer groups", "rocketmq_consumer_lag_messages", "{{consumer_group}} {{topic}}", "short"),
    ("Age of what groups have not read", "rocketmq_consumer_lag_latency", "{{consumer_group}} {{topic}}", "ms"),
    ("Lag of queries", "spark_query_lag_messages", "{{query_id}} {{topic}}", "short"),
    ("Age of what queries have not read", "spark_query_lag_latency_seconds", "{{query_id}} {{topic}}", "s"),
    ("Newest batch of each app", "spark_batch_last_version", "{{app}}", "short"),
    ("Bytes of the log", "rocketmq_storage_size", "{{store}}", "bytes"),
    ("How full the disk is", "spark_disk_used_ratio", "{{store}} {{folder}}", "percentunit"),
    ("Age of the oldest message", "rocketmq_storage_message_reserve_time", "{{store}}", "ms"),
    ("Delayed messages that wait", "spark_delayed_messages", "{{store}}", "short"),
    ("Open half messages", "spark_open_halves", "{{store}}", "short"),
    ("Staged bytes", "spark_staging_bytes", "{{store}}", "bytes"),
)
"""Title, expression, legend and unit of each curve."""
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3


def rules_text() -> str:
    """The alert rules, as YAML."""
    lines = [_HEAD + "groups:", "  - name: messagestore", "    rules:"]
    for rule in RULES:
        if rule.condition:
            lines += [
                f"      - alert: {alert_name(rule)}",
                f"        expr: {json.dumps(rule.condition)}",
                f"        for: {rule.lasts}",
                f"        labels: {{severity: {'critical' if rule.severity == FAULT else 'warning'}}}",
                "        annotations:",
                f"          summary: {json.dumps('{{ $labels.store }}: ' + rule.meaning)}",
                '          description: "`messagestore status` on the store\'s host says what it is and what to do."',
            ]
    return "\n".join(lines) + "\n"


def alert_name(rule: Rule) -> str:
    """`no-room` -> `MessagestoreNoRoom`."""
    return "Messagestore" + "".join(word.capitalize() for word in rule.name.split("-"))


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana imports it."""
    source = {"type": "prometheus", "uid": "${source}"}
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": title,
            "datasource": source,
            "targets": [{"refId": "A", "expr": _of_store(expression), "legendFormat": legend, "datasource": source}],
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "gridPos": {
                "x": number % _COLUMNS * _WIDTH,
                "y": number // _COLUMNS * _HEIGHT,
                "w": _WIDTH,
                "h": _HEIGHT,
            },
        }
        for number, (title, expression, legend, unit) in enumerate(_PANELS)
    ]

    variables = [
        {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {
            "name": "store",
            "type": "query",
            "datasource": source,
            "query": "label_values(spark_store_up, store)",
            "refresh": 2,
            "includeAll": True,
            "multi": True,
        },
    ]

    return {
        "title": "Message stores",
        "uid": "messagestore",
        "tags": ["messagestore"],
        "schemaVersion": 39,
        "time": {"from": "now-24h", "to": "now"},
        "refresh": "1m",
        "templating": {"list": variables},
        "panels": panels,
    }


def _of_store(expression: str) -> str:
    """The expression for the stores that are chosen on the dashboard."""
    chosen = '{store=~"$store"}'
    return expression.replace("[5m]", f"{chosen}[5m]") if "[5m]" in expression else expression + chosen


def files() -> dict[str, str]:
    """The text of each file, by its path."""
    return {
        "prometheus/messagestore.rules.yml": rules_text(),
        "grafana/messagestore.json": json.dumps(dashboard(), indent=2) + "\n",
    }


if __name__ == "__main__":
    for name, text in files().items():
        path = Path(sys.argv[1], name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
