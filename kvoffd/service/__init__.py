"""Use cases of the daemon: they own sessions and jobs, and no block's state."""
