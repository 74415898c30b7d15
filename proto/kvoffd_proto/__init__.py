"""The wire protocol: its .proto files and the stubs generated from them."""
