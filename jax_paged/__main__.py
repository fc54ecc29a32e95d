"""`python -m jax_paged`, and what the command `jax-paged` starts."""

import sys


def main() -> int:
    """Runs the command line; returns the exit code."""
    if sys.stderr.isatty():  # the models take a second to import; the command line clears the line
        print("\rloading …", end="", file=sys.stderr, flush=True)
    try:
        from jax_paged.models import cli
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
