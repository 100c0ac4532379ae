"""The mathematics of kernel contracts: chains of bounds, estimators and intervals. NumPy and SciPy only."""
