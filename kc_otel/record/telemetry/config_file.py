"""OTEL_CONFIG_FILE: a declarative configuration in the place of the other OTEL_* variables, as specified.

Spans go to the global tracer provider, which whoever starts the SDK makes from the same file. Metrics have an export
loop of their own, and take resource, exporters and times from the file's readers that push. What has no meaning for
them is left alone: views, cardinality limits and temporality, since points are aggregated here and are cumulative.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from typing import Any, Final

from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.resources import Resource

__all__ = ["configured", "file_exporters", "file_readers", "file_resource", "file_seconds"]

_log: Final = logging.getLogger("kc_otel")
_VARIABLE: Final = "OTEL_CONFIG_FILE"


def configured() -> bool:
    """Whether there is such a file: then it is the only source."""
    return bool(os.environ.get(_VARIABLE, "").strip())


def file_readers() -> tuple[Any, ...]:
    """The periodic readers of its meter provider; none where it has none, or is disabled.

    Raises:
        ValueError: If the file cannot be used.
    """
    config = _loaded(os.environ[_VARIABLE].strip())
    readers = (config.meter_provider.readers or ()) if config.meter_provider and not config.disabled else ()
    for reader in readers:
        if reader.periodic is None:
            # A pull reader belongs to the program's own meter provider; it is not an error here.
            _log.warning("%s: a reader that is pulled from does not push; drift is not exported through it", _VARIABLE)
    return tuple(reader.periodic for reader in readers if reader.periodic is not None)


def file_exporters() -> tuple[MetricExporter, ...]:
    """New exporters, one for each reader that pushes.

    Raises:
        ValueError: If the file cannot be used, or names what is not installed.
    """
    from opentelemetry.configuration import _meter_provider  # noqa: PLC0415 - no public function makes exporters

    try:
        return tuple(_meter_provider._create_push_metric_exporter(each.exporter) for each in file_readers())  # noqa: SLF001
    except Exception as error:
        raise ValueError(f"{_VARIABLE}: {error}") from error


def file_resource() -> Resource:
    """The resource that it describes; OTEL_RESOURCE_ATTRIBUTES counts only where the file names it.

    Raises:
        ValueError: If the file cannot be used.
    """
    config = _loaded(os.environ[_VARIABLE].strip())
    from opentelemetry.configuration import _resource  # noqa: PLC0415 - as above

    found: Resource = _resource.create_resource(config.resource)
    return found


def file_seconds(name: str, default: float) -> float:
    """`interval` or `timeout` of the first reader that has one, or `default`; also where the file cannot be used."""
    try:
        found = [getattr(reader, name) for reader in file_readers() if getattr(reader, name) is not None]
    except ValueError:
        return default  # whoever asks for exporters is told
    return found[0] / 1000.0 if found and found[0] > 0 else default


@lru_cache(maxsize=1)
def _loaded(path: str) -> Any:
    try:
        from opentelemetry.configuration import load_config_file  # noqa: PLC0415 - optional
    except ImportError:
        raise ValueError(f"{_VARIABLE} is set: pip install opentelemetry-configuration, which reads it") from None
    try:
        return load_config_file(path)
    except Exception as error:
        raise ValueError(f"{_VARIABLE}: {path}: {error}") from error
