"""Small modules of PTX for tests."""

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"


def module(body: str, parameters: str = "", directives: str = "", registers: str = "") -> str:
    """A module with one kernel `k`."""
    declared = registers or ".reg .pred %p<9>; .reg .b32 %r<99>; .reg .b64 %rd<9>;"
    return f"{HEAD}.visible .entry k({parameters}) {directives}\n{{\n{declared}\n{body}\n}}\n"
