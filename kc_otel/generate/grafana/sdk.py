"""The parts of grafana-foundation-sdk that the dashboards are built with, imported in one place.

The SDK is an extra: only generating dashboards needs it. Its module of classic dashboards warns on import that newer
ones exist; classic ones are what every Grafana in use can read, so the warning is not passed on.
"""

from __future__ import annotations

import warnings

from kc_otel._extras import extra

with extra("grafana", "a dashboard"), warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.builders import (
        common,
        dashboard,
        heatmap,
        prometheus,
        stat,
        statetimeline,
        table,
        tempo,
        timeseries,
        xychart,
    )
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models import common as common_models
    from grafana_foundation_sdk.models import dashboard as models
    from grafana_foundation_sdk.models import heatmap as heatmap_models
    from grafana_foundation_sdk.models import tempo as tempo_models
    from grafana_foundation_sdk.models import xychart as xychart_models

__all__ = [
    "JSONEncoder", "common", "common_models", "dashboard", "heatmap", "heatmap_models", "models", "prometheus", "stat",
    "statetimeline", "table", "tempo", "tempo_models", "timeseries", "xychart", "xychart_models",
]  # fmt: skip
