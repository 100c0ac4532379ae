"""What happened, for people: incidents in words, distributions, and documents of a period or of a gate."""
