"""The public face of pdserve: client SDK, CLI, generated stubs, sessions, channels. Imports nothing else of ours."""

__version__ = "0.1.0"
