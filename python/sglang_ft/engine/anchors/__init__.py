"""Checkpoints of recurrent states at anchors, in SGLang's cache: docs/anchors.md.

prefill.py    which positions of a chunk, and how its layers store their states
decode.py     states at markers that are sampled
held.py       the slots of states on their way into the tree
component.py  the tree's side: insertion along a path, order of dropping, states that went wrong
serving.py    puts these together when the server's cache is made; the hooks
"""
