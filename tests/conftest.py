"""Settings for all tests: no network, small thread pools."""

import os

# Before any test imports torch or the hub's libraries, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Models of a few thousand numbers gain nothing from a second thread, and wait for it when the machine is busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
