"""verl, watched without a change to its code: `pip install 'kc-otel[verl]'` and `KC_OTEL_CONTRACT=contract.yaml`.

verl imports what is in its entry-point group `verl.plugins`; ours puts wrappers around two functions of its trainers
once they are imported, and does nothing else.
"""
