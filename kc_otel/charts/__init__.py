"""Charts of the page as SVG text: a cell's past, what was observed, drift along depth.

A drawing has no width of its own: lines stretch with the place they are put in while texts keep their size, so that one
drawing is read on a phone, on a wide screen and on paper. Colours are classes that `charts.css` gives for light and
dark. No library, no randomness: equal data give equal bytes.
"""
