"""States that are neither modules nor optimizers: nested values, and objects with state_dict and load_state_dict."""
