"""One request on its workers: submitted, followed, resumed and rendered as deltas."""
