"""Plans for recorded and made-up days, in virtual time."""
