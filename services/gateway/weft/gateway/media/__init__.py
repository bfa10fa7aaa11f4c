"""Images of requests: decoded and processed in processes of their own, expanded in prompts."""
