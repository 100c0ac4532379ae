"""Public modules for services: the router, OpenFeature, and the verification of webhooks."""
