"""What several operations need: native code, memory, launches."""
