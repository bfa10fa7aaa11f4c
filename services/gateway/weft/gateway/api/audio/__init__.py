"""Transcription of speech: OpenAI's calls of audio."""
