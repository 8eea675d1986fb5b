"""Multimodal models: what people describe their units by, the layers that each is cut into, and the whole of them."""
