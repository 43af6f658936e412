"""The sharding rules, one module a family, each written as PyTorch core would hold it.

Importing this package fills the registry; it does not touch DTensor.
"""

from . import bitcast as bitcast
