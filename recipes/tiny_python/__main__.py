"""``python -m recipes.tiny_python``."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
