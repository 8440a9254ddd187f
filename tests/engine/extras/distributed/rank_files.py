"""Run under torchrun: a command in whose arguments {rank} is the process's own number."""

import os
import sys

from zerowaste_vae.engine.extras import cli

if __name__ == "__main__":
    sys.exit(cli.main([text.replace("{rank}", os.environ["RANK"]) for text in sys.argv[1:]]))
