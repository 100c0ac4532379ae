"""What users attach to their programs."""
