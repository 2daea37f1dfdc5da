# SPDX-License-Identifier: Apache-2.0
"""`python -m exactqat.cli`."""

from . import main

if __name__ == "__main__":
    main()
