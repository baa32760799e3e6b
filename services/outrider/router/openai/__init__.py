"""The OpenAI-compatible door: HTTP in, the same `core.ports.GenerationService` behind it as behind gRPC.

`schema` reads requests, `answer` writes whole answers and chunks, `door` is the ASGI application.
Fields that OpenAI does not have carry vLLM's names. Nothing here knows of Ray or gRPC.
"""
