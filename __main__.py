"""The console command, run as `python -m zerowaste_vae`."""

import sys

from .engine.cli import main

if __name__ == "__main__":
    sys.exit(main())
