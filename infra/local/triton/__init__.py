"""NVIDIA Triton as a child process, with an onnxruntime backend."""
