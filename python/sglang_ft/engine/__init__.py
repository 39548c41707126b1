"""The only folder that imports sglang: adapters, one per concern.

Everything here can break at an SGLang upgrade; nothing outside can. Hooks go through SGLang's HookRegistry and
are verified at start (install.py), in every process.
"""
