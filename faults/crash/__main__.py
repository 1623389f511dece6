import sys

from crash.runner import main

if __name__ == "__main__":  # the processes that a mode spawns import this, too
    sys.exit(main())
