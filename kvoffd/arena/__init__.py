"""The arena: host memory for slots, and the tables that say what lies in them."""
