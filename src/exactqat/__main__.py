# SPDX-License-Identifier: Apache-2.0
"""`python -m exactqat`: the command of the Python that runs, whatever the search path finds; notebooks need that."""

from .cli import main

if __name__ == "__main__":
    main()
