"""The data plane: processes that copy shards between engines' pools and the arena."""
