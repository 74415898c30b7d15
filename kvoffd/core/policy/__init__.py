"""Policies: which block goes when room is needed. One file each."""
