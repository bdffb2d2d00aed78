"""Makes ``python -m tvm_fusion.cli`` the same as ``tvm-fusion``."""

import sys

from . import main

sys.exit(main())
