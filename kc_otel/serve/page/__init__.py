"""Files of the page at `/`; uPlot 1.6.32 (MIT, `uPlot.LICENSE`) is among them as its authors minified it."""
