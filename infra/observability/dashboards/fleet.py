"""Engines, drafts, routers and nodes."""

from infra.observability.dashboards.panels import DRAFTS, STATE, WHERE, Dashboard, Panel, Query, increase, level, one

__all__ = ["FLEET"]

ENGINE, ROUTER, DRAFT, NODE = "{{engine}}", "{{router}}", "{{replica}}", "{{NodeAddress}}"
NO_GPU = "there is no GPU"

FLEET = Dashboard(
    uid="outrider-fleet",
    title="Outrider / Fleet",
    description="Engines, drafts, routers and the nodes they run on.",
    rows={
        "Engines": [
            Panel(title="Engines that serve", queries=one(level("outrider_engine_ready"), ENGINE), kind=STATE),
            Panel(
                title="Starts and failures",
                queries=[
                    Query(
                        expr=f"sum by (engine) (ray_outrider_engine_starts_total{{{WHERE}}})", legend=f"{ENGINE} starts"
                    ),
                    Query(
                        expr=f"sum by (engine) (ray_outrider_engine_failures_total{{{WHERE}}})",
                        legend=f"{ENGINE} failures",
                    ),
                ],
            ),
            Panel(
                title="Engines per node",
                queries=one(f"sum by (NodeAddress) (ray_outrider_engine_ready{{{WHERE}}})", NODE),
            ),
            Panel(
                title="Sequences that ended with an error",
                queries=one(increase("outrider_engine_sequences_failed"), ENGINE),
                unit="ops",
            ),
            Panel(
                title="Engines lost, sequences lost and moved",
                queries=[
                    Query(expr=increase("outrider_router_engine_losses", "router"), legend=f"{ROUTER} engines lost"),
                    Query(expr=increase("outrider_router_sequences_lost", "router"), legend=f"{ROUTER} sequences lost"),
                    Query(
                        expr=increase("outrider_router_sequences_moved", "router"), legend=f"{ROUTER} sequences moved"
                    ),
                ],
                unit="ops",
            ),
            Panel(
                title="Tokens per engine",
                queries=one(increase("spec_decode_num_committed_tokens"), ENGINE),
                unit="tokens/s",
            ),
        ],
        "Drafts": [
            Panel(
                title="Drafts that serve",
                queries=one(level("outrider_draft_ready", "replica", DRAFTS), DRAFT),
                kind=STATE,
            ),
            Panel(
                title="Links",
                queries=[
                    Query(expr=level("outrider_draft_links", "replica", DRAFTS), legend=f"{DRAFT} engines"),
                    Query(
                        expr=level("outrider_draft_link_connected", "engine, draft"),
                        legend=f"{ENGINE} to {{{{draft}}}}",
                    ),
                ],
            ),
            Panel(title="Links lost", queries=one(increase("outrider_draft_link_losses"), ENGINE), unit="ops"),
            Panel(
                title="Draft step",
                queries=one(level("outrider_draft_step_seconds", "replica", DRAFTS), DRAFT),
                unit="s",
            ),
            Panel(
                title="Sequences held, and KV in use",
                queries=[
                    Query(expr=level("outrider_draft_sequences", "replica", DRAFTS), legend=f"{DRAFT} sequences"),
                    Query(expr=level("outrider_draft_kv_usage_ratio", "replica", DRAFTS), legend=f"{DRAFT} KV"),
                ],
            ),
            Panel(
                title="Blocks and tables sent",
                queries=[
                    Query(expr=increase("outrider_draft_blocks", "replica", DRAFTS), legend=f"{DRAFT} blocks"),
                    Query(expr=increase("outrider_draft_tables", "replica", DRAFTS), legend=f"{DRAFT} tables"),
                    Query(expr=increase("outrider_draft_superseded", "replica", DRAFTS), legend=f"{DRAFT} overtaken"),
                ],
                unit="ops",
            ),
            Panel(
                title="Repairs and refusals",
                queries=[
                    Query(expr=increase(f"outrider_draft_{name}", "replica", DRAFTS), legend=f"{DRAFT} {name}")
                    for name in ("resyncs", "drift", "refusals", "evictions")
                ],
                unit="ops",
            ),
        ],
        "Nodes": [
            Panel(
                title="CPU",
                queries=one('max by (ip) (ray_node_cpu_utilization{SessionName=~"$SessionName"})', "{{ip}}"),
                unit="percent",
            ),
            Panel(
                title="Memory",
                queries=one('max by (ip) (ray_node_mem_used{SessionName=~"$SessionName"})', "{{ip}}"),
                unit="bytes",
            ),
            Panel(
                title="GPU",
                queries=[
                    Query(
                        expr='max by (ip, GpuIndex) (ray_node_gpus_utilization{SessionName=~"$SessionName"})',
                        legend="{{ip}} {{GpuIndex}} busy",
                        empty_by_design=NO_GPU,
                    ),
                    Query(
                        expr='max by (ip, GpuIndex) (ray_node_gram_used{SessionName=~"$SessionName"})',
                        legend="{{ip}} {{GpuIndex}} MiB",
                        empty_by_design=NO_GPU,
                    ),
                ],
            ),
            Panel(
                title="Replicas that Serve calls healthy",
                queries=one(
                    "sum by (deployment) (ray_serve_deployment_replica_healthy"
                    '{application="outrider", SessionName=~"$SessionName"})',
                    "{{deployment}}",
                ),
            ),
        ],
    },
)
