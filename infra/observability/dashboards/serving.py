"""What clients get."""

from infra.observability.dashboards.panels import Dashboard, Panel, Query, increase, level, one, quantiles, share

__all__ = ["SERVING"]

ENGINE, ROUTER = "{{engine}}", "{{router}}"

SERVING = Dashboard(
    uid="outrider-serving",
    title="Outrider / Serving",
    description="What clients get: requests, tokens, waiting, and how long it takes.",
    rows={
        "Requests": [
            Panel(
                title="Requests started",
                queries=one(increase("outrider_requests_started", "traffic_class"), "{{traffic_class}}"),
                unit="reqps",
            ),
            Panel(
                title="Requests ended, by outcome",
                queries=one(increase("outrider_requests_finished", "outcome"), "{{outcome}}"),
                unit="reqps",
                description="completed, abandoned (the client left), or the class of the error.",
            ),
            Panel(
                title="Requests refused, by error",
                queries=one(increase("outrider_requests_refused", "error"), "{{error}}"),
                unit="reqps",
                description="Before they ran: limits, wrong fields, no engine.",
            ),
            Panel(title="Requests running", queries=one(level("outrider_requests_running", "router"), ROUTER)),
            Panel(
                title="Choices ended, by reason",
                queries=one(increase("outrider_choices_finished", "finish_reason"), "{{finish_reason}}"),
                unit="ops",
            ),
            Panel(
                title="Failed share of the error budget's requests",
                queries=one("outrider:errors:ratio_rate5m", "5 min"),
                unit="percentunit",
                description="Recorded by the rules: failures that are the service's own, over all requests it owed.",
            ),
        ],
        "Time": [
            Panel(
                title="Time to first token",
                queries=quantiles("gen_ai_server_time_to_first_token", 0.5, 0.9, 0.99),
                unit="s",
            ),
            Panel(
                title="Time per output token",
                queries=quantiles("gen_ai_server_time_per_output_token", 0.5, 0.9, 0.99),
                unit="s",
                description="(E2E - TTFT) / (n - 1) of each choice; the gaps between chunks are longer.",
            ),
            Panel(title="Duration", queries=quantiles("gen_ai_server_request_duration", 0.5, 0.9, 0.99), unit="s"),
            Panel(
                title="Waiting for admission", queries=quantiles("outrider_request_queue_seconds", 0.5, 0.99), unit="s"
            ),
            Panel(title="Prefill", queries=quantiles("outrider_request_prefill_seconds", 0.5, 0.99), unit="s"),
        ],
        "Tokens and memory": [
            Panel(
                title="Output tokens",
                queries=one(increase("outrider_output_tokens", "traffic_class"), "{{traffic_class}}"),
                unit="tokens/s",
            ),
            Panel(
                title="Prompt tokens",
                queries=[
                    Query(expr=increase("outrider_prompt_tokens", "model_name"), legend="all"),
                    Query(expr=increase("outrider_cached_prompt_tokens", "model_name"), legend="from the prefix cache"),
                ],
                unit="tokens/s",
            ),
            Panel(
                title="Prefix cache hit rate",
                queries=one(share("outrider_prefix_cache_hit_tokens", "outrider_prefix_cache_queried_tokens"), ENGINE),
                unit="percentunit",
            ),
            Panel(
                title="Batch and queue",
                queries=[
                    Query(expr=level("outrider_engine_sequences_running"), legend=f"{ENGINE} running"),
                    Query(expr=level("outrider_engine_sequences_waiting"), legend=f"{ENGINE} waiting"),
                ],
            ),
            Panel(
                title="KV blocks in use",
                queries=one(level("outrider_engine_kv_usage_ratio"), ENGINE),
                unit="percentunit",
            ),
            Panel(
                title="Preemptions",
                queries=one(increase("outrider_engine_preemptions"), ENGINE),
                unit="ops",
                description="Sequences that lost their KV and were recomputed.",
            ),
        ],
    },
)
