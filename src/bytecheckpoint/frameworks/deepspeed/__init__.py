"""The DeepSpeed adapter: engines, ZeRO of all stages, pipelines and mixtures of experts."""
