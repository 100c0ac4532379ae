"""Made-up traffic of two kernels, for looking at dashboards."""
