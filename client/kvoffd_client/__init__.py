"""The client of kvoffd: sessions that cost an engine's own threads next to nothing.

Needs grpcio and protobuf, and loads neither torch nor an engine.
"""

from kvoffd_client.paths import keep_grpc_out_of_forks

keep_grpc_out_of_forks()
