"""Operators of recurrent layers that torch lacks, in plain torch: vectorised over tokens, heads and requests.

They know nothing of SGLang; replacements.py puts them in the place of its Triton kernels.
"""
