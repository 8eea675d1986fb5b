"""Models as named layers, and the adapters that cut known families into them."""
