"""All-reduce fused with residual, RMSNorm and quantisation: its value, its checks, its routes."""
