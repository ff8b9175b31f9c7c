"""What the gateway tells the outside of each request: the access log, and traces and metrics for OpenTelemetry."""
