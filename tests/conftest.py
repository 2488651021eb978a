"""For all tests: generated cases are not judged by how long they take, since the cores are shared with other tests."""

from hypothesis import HealthCheck, settings

settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")
