"""The back end of the block level: Tile IR with roles and shared memory to TTGIR."""
