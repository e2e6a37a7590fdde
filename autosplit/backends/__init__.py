"""How a stage runs on a device: one runtime a file, each a Backend of base.py.

ONNX Runtime reports its use over the network from its first import, and leaves a file in the temporary folder; that is off
here unless the user's environment says otherwise.
"""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
