"""The version. setuptools reads this literal without importing the package."""

VERSION = "0.3.0"
