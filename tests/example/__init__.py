"""The example site as its visitors meet it: over HTTP, with a worker, in a folder of its own."""
