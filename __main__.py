"""`python -m zerowaste_vae` is the console command."""

import sys

from .engine.cli import main

if __name__ == "__main__":
    sys.exit(main())
