"""What services import: the router, OpenFeature, and the verification of webhooks."""
