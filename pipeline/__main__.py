"""``python -m pipeline``: the same as the command ``pipeline``."""

from pipeline.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
