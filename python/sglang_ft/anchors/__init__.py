"""Where the states of recurrent layers are kept: anchors in the prompt, which of them, and for how long."""
