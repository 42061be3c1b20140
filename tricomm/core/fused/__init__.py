"""An all-reduce that goes on with residual, RMSNorm and quantisation: its value, its checks, its routes."""
