"""What of CUDA needs the torch and the Triton of the engine: its streams, and a kernel for small pages."""
