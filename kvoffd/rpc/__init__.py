"""The rim of the daemon: sockets, wire formats, and the validation of all input."""
