"""The HTTP front: admits, understands, recalls, joins, routes, relays and keeps."""
