"""What HTTP clients see of us beside SGLang's own API. Never imports sglang."""
