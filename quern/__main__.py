"""`python -m quern`: the console script, for torchrun and for an environment that is not active."""

import sys

from quern.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
