"""The version, in one place. setuptools reads the literal without importing anything."""

VERSION = "0.3.0"
