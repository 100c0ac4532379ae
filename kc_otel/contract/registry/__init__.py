"""The one registry of names: every quantity, metric and attribute that kc-otel measures, sends or stores."""
