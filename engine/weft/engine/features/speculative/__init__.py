"""Who proposes drafts, and how many of them pay."""
