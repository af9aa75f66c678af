"""Say whether compression pays for a model and a link, and which compressor to use."""
