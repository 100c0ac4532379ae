"""`examples` is no installed package: the repository's root has to be importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
