"""``python -m launch`` is the same as the ``flextensor`` command."""

from launch.cli import main

if __name__ == "__main__":
    main()
