"""The workers that this gateway follows: discovery, Sessions, loads and cached pages."""
