"""The demonstration: a real vLLM over kvoffd, on nothing but this machine's cores."""
