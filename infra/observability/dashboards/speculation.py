"""What speculation yields and what it costs."""

from infra.observability.dashboards.panels import STATE, Dashboard, Panel, Query, increase, level, one, quantiles, share

__all__ = ["SPECULATION"]

ENGINE = "{{engine}}"

SPECULATION = Dashboard(
    uid="outrider-speculation",
    title="Outrider / Speculation",
    description="Whether it is on, why, what it yields and what it costs. Formulas: outrider.telemetry.metrics.",
    rows={
        "On or off, and why": [
            Panel(
                title="Mode",
                queries=one(
                    level("outrider_engine_speculation_mode", "engine, mode") + " == 1", f"{ENGINE} {{{{mode}}}}"
                ),
                kind=STATE,
            ),
            Panel(
                title="Reason",
                queries=one(
                    level("outrider_engine_speculation_reason", "engine, reason") + " == 1", f"{ENGINE} {{{{reason}}}}"
                ),
                kind=STATE,
            ),
            Panel(
                title="Switches on or off",
                queries=one(increase("outrider_engine_speculation_switches"), ENGINE),
                unit="ops",
            ),
            Panel(
                title="Estimated speed-up over plain decoding",
                queries=one(
                    level("outrider_engine_estimated_speedup_ratio"),
                    ENGINE,
                    "needs plain and speculative steps of one size",
                ),
                unit="none",
            ),
            Panel(
                title="Share of steps that speculate",
                queries=one(share("outrider_engine_speculative_steps", "outrider_engine_steps"), ENGINE),
                unit="percentunit",
            ),
            Panel(
                title="Tokens per round",
                queries=one(share("spec_decode_num_committed_tokens", "spec_decode_num_rounds"), ENGINE),
                unit="none",
                description="Per sequence and step, plain rounds included.",
            ),
        ],
        "Acceptance": [
            Panel(
                title="Acceptance rate",
                queries=one(share("spec_decode_num_accepted_tokens", "spec_decode_num_verified_tokens"), ENGINE),
                unit="percentunit",
                description="Accepted / verified. Below 0.6 speculation barely pays, below 0.4 it hurts.",
            ),
            Panel(
                title="Acceptance by position in the block",
                queries=one(
                    share(
                        "spec_decode_num_accepted_tokens_per_pos", "spec_decode_num_verified_tokens_per_pos", "position"
                    ),
                    "{{position}}",
                ),
                unit="percentunit",
            ),
            Panel(
                title="Mean acceptance length",
                queries=one("1 + " + share("spec_decode_num_accepted_tokens", "spec_decode_num_drafts"), ENGINE),
                unit="none",
                description="1 + accepted / rounds that verified a block: includes the target's own token.",
            ),
            Panel(
                title="Draft tokens per block",
                queries=one(share("spec_decode_num_verified_tokens", "spec_decode_num_drafts"), ENGINE),
                unit="none",
            ),
            Panel(
                title="Drafted in vain",
                queries=one("1 - " + share("spec_decode_num_verified_tokens", "spec_decode_num_draft_tokens"), ENGINE),
                unit="percentunit",
                description="Draft tokens that arrived and were never verified.",
            ),
            Panel(
                title="Hit rate of tables (cached mode)",
                queries=one(
                    share("spec_decode_num_cached_hits", "spec_decode_num_cached_lookups"),
                    ENGINE,
                    "sequential mode looks nothing up",
                ),
                unit="percentunit",
            ),
        ],
        "The way to the draft": [
            Panel(
                title="Verdict to proposal",
                queries=one(
                    level("outrider_draft_link_round_trip_seconds", "engine, draft"), f"{ENGINE} {{{{draft}}}}"
                ),
                unit="s",
                description="Two hops and the drafting of one block.",
            ),
            Panel(
                title="A hop",
                queries=quantiles("outrider_draft_link_hop_seconds", 0.5, 0.9, 0.99),
                unit="s",
                description="One way: half of what a waited-for block took beside its drafting.",
            ),
            Panel(
                title="Late, stale and invalid",
                queries=[
                    Query(expr=increase("spec_decode_num_late"), legend=f"{ENGINE} late rounds"),
                    Query(expr=increase("spec_decode_num_stale"), legend=f"{ENGINE} stale blocks"),
                    Query(expr=increase("spec_decode_num_invalid"), legend=f"{ENGINE} invalid messages"),
                    Query(expr=increase("spec_decode_num_late_laws"), legend=f"{ENGINE} blocks without their laws"),
                ],
                unit="ops",
            ),
            Panel(
                title="Messages",
                queries=[
                    Query(expr=increase("spec_decode_num_draft_messages_sent"), legend=f"{ENGINE} sent"),
                    Query(expr=increase("spec_decode_num_draft_messages_received"), legend=f"{ENGINE} received"),
                ],
                unit="ops",
            ),
        ],
        "The step": [
            Panel(
                title="Step time by phase",
                queries=one(
                    f"{increase('outrider_engine_step_seconds', 'phase')} / ignoring (phase) group_left () "
                    f"({increase('outrider_engine_steps', '')} > 0)",
                    "{{phase}}",
                ),
                unit="s",
                stacked=True,
            ),
            Panel(title="Steps", queries=one(increase("outrider_engine_steps"), ENGINE), unit="ops"),
            Panel(
                title="Rows per step",
                queries=one(share("outrider_engine_forward_rows", "outrider_engine_steps"), ENGINE),
                unit="none",
            ),
        ],
    },
)
