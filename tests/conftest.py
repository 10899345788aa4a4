"""For all tests and whatever they start, one thread each: two that wait for each other crawl on a busy machine."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
