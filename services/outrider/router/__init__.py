"""The router: validates, tokenizes, admits and dispatches requests, and streams their text.

`service.RouterService` is the `GenerationService` behind every door. It reaches engines through
`core.ports.EngineSession`s and knows neither gRPC nor Ray nor torch.
"""
