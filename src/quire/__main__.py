"""``python -m quire``: the command line, as ``quire``."""

import sys


def main() -> None:
    """Run the command ``quire``, with handling of Ctrl-C while its modules are imported."""
    try:
        from quire.cli.main import main as run
    except KeyboardInterrupt:
        print("\nquire: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
