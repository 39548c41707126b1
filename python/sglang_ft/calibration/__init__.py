"""Bandwidths of the link and of the CPU, measured while both are busy, and kept for the next start."""
