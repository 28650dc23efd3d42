"""A module of an installed app that can't be imported, for another reason than a missing name."""

raise RuntimeError("SHOP_TOKEN is not set")
