"""The existing engines that mmrl trains with: one process, DDP, DeepSpeed ZeRO, FSDP2 (config: engine.train)."""
