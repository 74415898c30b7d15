"""Version 1 of the protocol; the wire name of its package is kvoffd.v1."""
