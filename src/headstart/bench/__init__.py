"""Measuring what speculation brings, in a record that others can check: `headstart bench`."""
