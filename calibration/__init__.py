"""Hardware profiles: figures with their source and evidence, and the reader for them."""
