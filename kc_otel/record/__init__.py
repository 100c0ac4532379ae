"""From tensors to OTLP: measuring, histograms, the recorder and its worker."""
