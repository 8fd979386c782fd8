"""megatron_cp: long-context training on released megatron-core."""

from megatron_cp.backend import hook

__version__ = "0.1.0"

# megatron-core must be prepared when it is first imported, whichever of our modules (or the user's) imports it.
hook.install()
