"""`python -m kakeya`: the command line of a source tree that is not installed."""

from kakeya.cli import main

if __name__ == "__main__":
    main()
