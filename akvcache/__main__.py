"""``python -m akvcache``."""

import sys

from akvcache.cli import main

if __name__ == "__main__":
    sys.exit(main())
