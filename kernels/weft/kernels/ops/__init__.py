"""Operations, a folder each: types, checks, a reference, and forms for devices."""
