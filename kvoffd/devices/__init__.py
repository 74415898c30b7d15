"""Devices: the memory that engines keep their KV pools in, behind one protocol."""
