"""The native layer. Only `kvmsgr.fabric` and `kvmsgr.device` import it.

Libraries that libfabric loads read these variables when they are loaded, so they are set before `native` is.
"""

import os

os.environ.setdefault("FI_SHM_DISABLE_CMA", "1")  # with CMA a frozen target reads pages long after they were given up
os.environ.setdefault("IPATH_NO_BACKTRACE", "1")  # these two keep libraries from replacing our signal handlers
os.environ.setdefault("HFI_NO_BACKTRACE", "1")
