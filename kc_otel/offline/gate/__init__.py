"""The first stage of a promotion: recordings in, a decision with its evidence out."""
