"""What the daemon says of itself."""
