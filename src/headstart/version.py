"""Which Headstart this is."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("headstart")
except PackageNotFoundError:  # run from a checkout
    VERSION = "0"
