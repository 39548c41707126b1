"""sglang_ft: serve Mixture-of-Experts models whose experts do not fit in GPU memory."""

__version__ = "0.1.0"
