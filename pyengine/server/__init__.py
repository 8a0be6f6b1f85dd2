"""The gRPC server: `python -m pyengine.server`. The API is protos/pyengine/v1/inference.proto."""
