# SPDX-License-Identifier: Apache-2.0
"""The command line: `exactqat train` and the other commands."""

from __future__ import annotations

import sys
import traceback

from .terminal import open_streams, to_nobody

INSTALL = "pip install 'exactqat[job]', or for inspect alone, without PyTorch, 'exactqat[inspect]'"


def main() -> None:
    """Entry point of the `exactqat` command."""
    open_streams()
    if sys.argv[1:2] == ["--version"]:  # answered without importing what the commands need
        from exactqat import __version__

        print(f"exactqat {__version__}")
        return
    try:
        from .application import Negative, command_line

        try:
            command_line()()
        except Negative:
            raise
        except SystemExit as error:
            # Libraries exit with 1 for failures of any kind.
            raise SystemExit(error.code if error.code in (None, 0, 130) else 2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith(("exactqat", "None")):
            sys.stderr.write(f"exactqat: {error.name} is not installed. Install it with: {INSTALL}\n")
        else:
            traceback.print_exc()
        raise SystemExit(2) from None
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                to_nobody(stream)
