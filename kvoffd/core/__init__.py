"""The brain of the daemon: pure state and rules, entered by kvoffd.core.cache.Cache alone."""
