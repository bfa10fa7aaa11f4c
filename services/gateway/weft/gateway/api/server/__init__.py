"""What tools, probes and load balancers made for other servers ask for."""
