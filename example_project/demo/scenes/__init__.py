"""The scenes of the demo. Each plays, waits for the end, and yields what it promised."""
