"""Sharding rules that PyTorch DTensor lacks or has wrong, and SPMD-safe stochastic rounding on shards.

Import it once at startup. The import installs; ``DTENSOR_EXT_DISABLE=1`` in the environment turns that off.
"""

import os as _os

from .install import install, is_installed, register, rules, uninstall, unregister
from .region import in_spmd_region, spmd_region
from .streams import load_state_dict, manual_seed, state_dict

__version__ = "0.1.0"

__all__ = [
    "in_spmd_region",
    "install",
    "is_installed",
    "load_state_dict",
    "manual_seed",
    "register",
    "rules",
    "spmd_region",
    "state_dict",
    "uninstall",
    "unregister",
]

if _os.environ.get("DTENSOR_EXT_DISABLE", "0").lower() in ("", "0", "false", "no"):
    install()
