"""`python -m openk3` is `openk3`."""

from __future__ import annotations

import sys

from openk3.cli import main

if __name__ == "__main__":
    sys.exit(main())
