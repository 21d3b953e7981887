"""Inspect running models by module hooks: attention maps, dynamic spans, the time of attention."""
