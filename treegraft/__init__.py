"""Tree speculative decoding with several drafters, one shared draft tree and a learned scheduler."""
