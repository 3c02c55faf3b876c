"""Against other projects' own code, in an environment of its own: `make peers`. Skipped where they are not installed."""
