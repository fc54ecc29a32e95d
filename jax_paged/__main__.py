# SPDX-License-Identifier: Apache-2.0
"""`python -m jax_paged`, and what the command `jax-paged` starts."""

import gc
import os
import signal
import sys

from jax_paged._start import supervise
from jax_paged._start.command_line import parser
from jax_paged._start.interrupt import EXIT_CODE, leave_at_ctrl_c


def main() -> int:
    """Runs the command line; returns the exit code, after Ctrl-C it ends the process."""
    leave_at_ctrl_c()
    supervise.end_with_supervisor()
    options = parser().parse_args()  # --help and mistakes need not wait for jax
    if options.command == "supervise":
        return supervise.run(options)
    if sys.stderr.isatty():  # the models take a second to import; the command line clears the line
        print("\rloading …", end="", file=sys.stderr, flush=True)
    from jax_paged.models import cli

    gc.freeze()  # modules stay
    gc.enable()
    try:
        code = cli.run(options)
    except KeyboardInterrupt:
        code = EXIT_CODE
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done
    if code == EXIT_CODE:  # XLA may still compile what nobody waits for
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
