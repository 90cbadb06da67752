"""config.json and generation_config.json, checked. No torch."""
