"""What recorders export, in memory."""

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult

__all__ = ["Memory"]


class Memory(MetricExporter):
    def __init__(self):
        super().__init__()
        self.exports = []
        self.result = MetricExportResult.SUCCESS
        self.answering = lambda: None

    def export(self, metrics_data, **_):
        self.exports.append(metrics_data)
        self.answering()
        return self.result

    def force_flush(self, **_):
        return True

    def shutdown(self, **_):
        pass

    def points(self, name, export=-1, **attributes):
        """Data points of a metric in one export that have these attributes (given with _ for .)."""
        wanted = {key.replace("_", "."): value for key, value in attributes.items()}
        return [
            point
            for resource in self.exports[export].resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
            if wanted.items() <= dict(point.attributes).items()
        ]

    def count(self, slice="all", export=-1):
        """Tokens recorded for a slice, over all kernel pairs."""
        return sum(point.count for point in self.points("kc.drift.tv_token", export, kc_slice=slice))
