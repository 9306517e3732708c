"""ecoffload-xpu: batched copies on Intel XPU, enqueued on the SYCL queue that torch hands out.

``plugin`` declares it, ``backend`` copies and registers, ``ways`` reaches libsycl (through the shim or dpctl's
library), ``staging`` holds the bytes of host memory that the device must not read late. ``sycl_cpu`` is a test device:
the same backend on the SYCL runtime's CPU device. Nothing is imported before it is used.
"""

from __future__ import annotations

__version__ = "0.1.0"
