"""Mistakes in a loss or an update: found while it is traced, told in plain words."""
