"""The version of this package, for those below the package itself."""

VERSION = "0.1.0"
PROTOCOL = 6
"""of what members tell each other: one more whenever a format changes, for builds of one version may differ in it"""
