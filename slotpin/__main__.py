from __future__ import annotations

import sys

from slotpin.cli import main

sys.exit(main())
