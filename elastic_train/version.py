"""The version of this package, for those below the package itself."""

VERSION = "0.1.0"
