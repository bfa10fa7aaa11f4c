"""What prefill and decode workers share: the engine process and the services around it."""
