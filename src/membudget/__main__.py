"""``python -m membudget``: the command without its script."""

import sys

from membudget.command import main

sys.exit(main())
