from __future__ import annotations

import signal

# A shell starts background jobs with SIGINT ignored, and children would inherit that: tests that interrupt a child
# need it to be as on a terminal.
signal.signal(signal.SIGINT, signal.default_int_handler)
