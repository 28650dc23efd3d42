"""The scenes of the demo. Each plays, kills something, and yields what it promised."""
