"""Code shared by prefill and decode workers: the engine process and the services around it."""
