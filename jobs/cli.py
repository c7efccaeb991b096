"""The ``headrace`` command: where it starts, and what becomes of Ctrl-C."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C at any moment is exit code 130."""
    try:
        # Loading takes a moment, in which Ctrl-C must find somebody already.
        from jobs.allocator import keep_freed_memory  # noqa: PLC0415
        from jobs.commands import run  # noqa: PLC0415

        keep_freed_memory()
        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
