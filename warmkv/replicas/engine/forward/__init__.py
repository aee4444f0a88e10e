"""Passes of the model: as it is, as one graph, or with its layers compiled one by one."""

from warmkv.replicas.engine.forward.compiled import Compiled, CompiledForward, LayeredForward, compiled, compiles
from warmkv.replicas.engine.forward.eager import ModelRunner

__all__ = ["Compiled", "CompiledForward", "LayeredForward", "ModelRunner", "compiled", "compiles"]
