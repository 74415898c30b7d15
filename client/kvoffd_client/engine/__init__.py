"""The halves of a connector that know no engine: what to store, look up and load, and when.

The scheduler half decides, the rank half hands over and proves. Neither knows
gRPC (that is a session behind a port) nor any engine (that is an adaptor before them).
"""
