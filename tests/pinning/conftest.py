from __future__ import annotations

from hypothesis import HealthCheck, settings

# No deadline: a busy machine is not a failure. No database: a run leaves nothing behind.
settings.register_profile(
    "slotpin",
    max_examples=60,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("slotpin")
