"""The version of this build, as packages, `/version` and Hello say it."""

VERSION = "0.1.0"
