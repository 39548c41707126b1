"""Experts: their weight formats, the host banks that hold them, and the readable reference of a layer.

Knows torch and the worker, never SGLang.
"""
