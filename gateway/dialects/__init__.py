"""One file per API dialect: its requests, streams, usage and error forms."""
