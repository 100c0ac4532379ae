"""SGLang: sampled tokens of its requests, with log-probabilities, for the comparison with the training kernel.

    KC_OTEL_CONTRACT=contracts/policy.yaml python -m sglang.launch_server --model-path MODEL   # nothing else to change

The environment variables are those of `kc_otel.integrations.vllm.settings`, and so are files, slices and rescoring.
"""
