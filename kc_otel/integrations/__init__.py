"""Engines and trainers, each in a file or folder of its own that imports its library inside.

    trl             instrument(trainer, contract): TRL's GRPO trainer
    transformers    callbacks of Hugging Face's Trainer
    vllm            KernelContractInstrumentor: what a server samples
    torch           observe and shadow: modules of any training loop
    operators       compare_callables: single operators

A new one calls `kc_otel.Recorder` and nothing deeper; it never raises into what it instruments.
"""
