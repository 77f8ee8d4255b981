"""Save and load states other than modules and optimizers: nested values, and objects with a state_dict."""
