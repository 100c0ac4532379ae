"""slime: its custom-function hooks, by arguments of its own command line and `KC_OTEL_CONTRACT`.

Add one of these:

    --rollout-data-postprocess-path kc_otel.integrations.slime.slime_hooks.record_rollout       # once a rollout
    --get-mismatch-metrics --custom-tis-function-path kc_otel.integrations.slime.slime_hooks.record_mismatch
"""
