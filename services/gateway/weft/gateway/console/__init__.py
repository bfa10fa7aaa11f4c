"""The mesh as one gateway sees it, for operators: members, flows, the last minutes."""
