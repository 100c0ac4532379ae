"""What every test has in common."""

from hypothesis import HealthCheck, settings

# How long an example takes says more about the machine's other tenants than about the code.
settings.register_profile("kc-otel", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kc-otel")
