"""``python -m dtensor_ext``."""

import sys

from .cli.main import main

# The guard matters: processes that the demo spawns import this module too.
if __name__ == "__main__":
    sys.exit(main())
